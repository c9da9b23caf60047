"""The two kinds of errors that users see."""


class UsageError(ValueError):
    """A request that cannot be met as it is; one sentence with what to change. Exit code 2."""


class DataError(RuntimeError):
    """A sound request that failed: a corrupt file, no network, a full disk. Exit code 1."""
