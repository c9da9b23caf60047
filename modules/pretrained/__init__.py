"""Weights of other libraries' models to ours and back: dictionaries in, dictionaries out."""
