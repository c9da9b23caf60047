"""`tasks.mlm`."""
