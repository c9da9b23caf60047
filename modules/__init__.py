"""Plain `torch.nn.Module` building blocks and the models assembled from them."""
