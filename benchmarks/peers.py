from burst_bench.peers.compare import main

if __name__ == "__main__":
    main()
