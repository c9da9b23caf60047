"""Sentiment and other text classification with a BERT-style encoder."""
