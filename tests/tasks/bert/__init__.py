"""Text classification and pretraining of encoders."""
