"""Commands of all tasks; folders hold those of one task or of one part of the suite."""
