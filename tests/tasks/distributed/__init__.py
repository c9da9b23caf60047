"""Runs of several processes, and sharded weights."""
