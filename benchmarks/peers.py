if __name__ == "__main__":
    from burst_bench.peers.compare import main

    main()
