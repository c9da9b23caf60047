"""Classifiers on frozen features, to tell how good a representation is."""
