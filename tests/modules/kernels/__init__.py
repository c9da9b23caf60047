"""Decoders: greedy, sampling, and beam search."""
