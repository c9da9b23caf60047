"""Image GPT: images as sequences of pixels, generated, completed, and probed."""
