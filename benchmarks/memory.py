import sys

sys.path.pop(0)  # this folder has a kernels.py, and transformers looks for a package of that name

from burst_bench.claims.memory import main

if __name__ == "__main__":
    main()
