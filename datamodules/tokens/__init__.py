"""Tokens: files that keep them, rows that are packed, masks."""
