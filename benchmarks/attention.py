from burst_bench.claims.attention import main

if __name__ == "__main__":
    main()
