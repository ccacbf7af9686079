"""Native code for x86-64 CPUs: matmuls, KV-cache writes, and running kernels in sequence."""
