if __name__ == "__main__":
    from burst_bench.claims.scaling import main

    main()
