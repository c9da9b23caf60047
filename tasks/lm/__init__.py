"""Language models: training on any text, generation, scores of texts."""
