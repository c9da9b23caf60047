"""Masked-language-model pretraining of a BERT-style encoder."""
