"""Optimizers, losses, precision, averaged weights and evaluation."""
