if __name__ == "__main__":
    from burst_bench.claims.published import main

    main()
