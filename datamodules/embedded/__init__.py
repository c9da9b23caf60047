"""Data sets that come with the suite: generated texts, and the reference of Python."""
