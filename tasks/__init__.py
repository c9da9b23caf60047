"""Lightning tasks: what a person runs (`python -m tasks.vit fit`)."""
