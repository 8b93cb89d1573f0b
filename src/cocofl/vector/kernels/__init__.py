"""What stacked layers compute with: plain PyTorch anywhere, Triton kernels of our own on CUDA."""

from cocofl.vector.kernels.base import Activation, Asked, Backward, Coefficients, Dropping, Norm

__all__ = ["Activation", "Asked", "Backward", "Coefficients", "Dropping", "Norm"]
