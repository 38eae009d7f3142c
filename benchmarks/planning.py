if __name__ == "__main__":
    from burst_bench.claims.planning import main

    main()
