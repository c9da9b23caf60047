"""Images: decoding, and random changes to whole batches."""
