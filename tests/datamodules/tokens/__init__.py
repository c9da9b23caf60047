"""Files of tokens, and how they are packed into rows."""
