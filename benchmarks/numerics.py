if __name__ == "__main__":
    from burst_bench.claims.numerics import main

    main()
