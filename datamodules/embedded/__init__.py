"""Text that needs no download: generated reviews, the reference of Python itself, and dates in two languages."""
