"""Pretraining of a Vision Transformer by reconstructing masked patches."""
