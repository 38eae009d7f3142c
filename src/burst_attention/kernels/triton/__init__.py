"""Our tile kernels in Triton, imported only on use."""
