"""What all datamodules use: batches, splits, files, errors."""
