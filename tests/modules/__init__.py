"""Blocks, models, kernels and generation."""
