"""Loggers and run folders."""
