if __name__ == "__main__":
    from burst_bench.claims.cost_model import main

    main()
