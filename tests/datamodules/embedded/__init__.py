"""Texts that come with the program."""
