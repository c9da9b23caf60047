"""Data: files, hub data sets and embedded samples in, batches of tensors out."""
