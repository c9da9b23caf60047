"""Checkpoints and weights: written, read, checked, exported."""
