"""Elementwise chains around a layer: plain PyTorch anywhere, fused Triton kernels on CUDA."""

from cocofl.vector.kernels.base import Activation, Backward, Coefficients, Dropping, Norm

__all__ = ["Activation", "Backward", "Coefficients", "Dropping", "Norm"]
