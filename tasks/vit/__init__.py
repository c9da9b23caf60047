"""ViT image classification."""
