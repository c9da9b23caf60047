"""Translation and other tasks from text to text, with an encoder-decoder."""
