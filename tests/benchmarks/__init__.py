"""Speed, memory and quality, beside those of other libraries."""
