if __name__ == "__main__":
    from burst_bench.claims.kernels import main

    main()
