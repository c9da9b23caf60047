"""Models: blocks assembled into ViT, Swin, MAE, BERT, GPT and encoder-decoders."""
