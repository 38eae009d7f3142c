if __name__ == "__main__":
    from burst_bench.ablation.compare import main

    main()
