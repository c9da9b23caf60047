"""Faster implementations of functions of PyTorch."""
