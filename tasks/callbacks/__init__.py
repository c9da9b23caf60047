"""Callbacks: progress, the record of a run, pictures."""
