if __name__ == "__main__":
    from burst_bench.claims.memory import main

    main()
