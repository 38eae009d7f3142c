"""Our own tile kernels in Triton. Imported only when they are asked for."""
