"""Batches and files."""
