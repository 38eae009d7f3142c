if __name__ == "__main__":
    from burst_bench.claims.nodes import main

    main()
