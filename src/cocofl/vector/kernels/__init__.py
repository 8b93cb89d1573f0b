"""Elementwise chains around a layer: plain PyTorch anywhere, fused Triton kernels on CUDA."""

from cocofl.vector.kernels.base import Activation, Asked, Backward, Coefficients, Dropping, Norm

__all__ = ["Activation", "Asked", "Backward", "Coefficients", "Dropping", "Norm"]
