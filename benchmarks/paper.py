if __name__ == "__main__":
    from burst_bench.paper.command import main

    main()
