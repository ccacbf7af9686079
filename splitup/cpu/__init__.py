"""Machine code of our own for x86-64: matrix products, cache writes, and loops over kernels."""
