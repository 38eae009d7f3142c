from burst_bench.claims.numerics import main

if __name__ == "__main__":
    main()
