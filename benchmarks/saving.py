if __name__ == "__main__":
    from burst_bench.claims.saving import main

    main()
