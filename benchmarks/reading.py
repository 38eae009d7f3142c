if __name__ == "__main__":
    from burst_bench.claims.reading import main

    main()
