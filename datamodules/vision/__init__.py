"""Images: reading and decoding them, batches of pixels, and augmentation of whole batches."""
