"""The record of a run: its folder, loggers, pictures."""
