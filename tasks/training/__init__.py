"""Training: loops, optimizers, averages of weights, precision."""
