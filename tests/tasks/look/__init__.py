"""Tests of `look`."""
