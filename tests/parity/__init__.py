"""Our models against those of transformers, timm and torchvision: equal logits, or refused."""
