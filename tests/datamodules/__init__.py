"""Data modules, and what they are made of: sources, tokenizers, batches."""
