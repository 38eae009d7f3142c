if __name__ == "__main__":
    from burst_bench.claims.attention import main

    main()
