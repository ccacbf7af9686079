"""From a graph to kernels as plain data: lowering, scheduling, compiling, a cache on disk."""
