"""Federated learning itself: who trains what, and how it comes together."""
