"""Checkpoints, resumed runs, model folders and exported models."""
