"""Models: blocks assembled into ViT, BERT, GPT and encoder-decoders."""
