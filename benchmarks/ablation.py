from burst_bench.ablation.compare import main

if __name__ == "__main__":
    main()
