"""Text that needs no download: generated reviews, and the reference of Python itself."""
