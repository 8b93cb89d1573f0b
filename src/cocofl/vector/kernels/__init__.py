"""What stacked layers compute with: plain PyTorch anywhere, Triton kernels of our own on CUDA."""
