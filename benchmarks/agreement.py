if __name__ == "__main__":
    from burst_bench.claims.agreement import main

    main()
