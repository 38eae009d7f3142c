if __name__ == "__main__":
    from burst_bench.claims.longest import main

    main()
