"""The two kinds of bad news: what the user said is wrong, or what was asked for failed."""


class UsageError(ValueError):
    """What the user asked for cannot be done as said; one sentence with what to change. Exit code 2."""


class DataError(RuntimeError):
    """What was asked for is sound but failed: a corrupt file, no network, a full disk. Exit code 1."""
