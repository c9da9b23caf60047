"""Lightning tasks: what a person runs (`python -m tasks.vit fit`)."""

__version__ = "0.1.0"
