"""Tokenizers: trained, pretrained, and SentencePiece's."""
