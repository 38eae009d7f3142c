from burst_bench.claims.kernels import main

if __name__ == "__main__":
    main()
