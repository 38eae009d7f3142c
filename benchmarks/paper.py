from burst_bench.paper.command import main

if __name__ == "__main__":
    main()
