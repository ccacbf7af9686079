"""Choosing a device, and the drivers that kernels run on: CUDA and NV, OpenCL, WebGPU."""
