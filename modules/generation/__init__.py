"""Generation: sampling, beam search and what they need of a model."""
