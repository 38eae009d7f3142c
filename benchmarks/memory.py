from burst_bench.claims.memory import main

if __name__ == "__main__":
    main()
