"""Token ids between the tokenizer and the model: cached in files, packed into rows, and masked."""
