"""Prepares a corpus slowly, or where a file may not be large: `python -m ... kill|full PATH`."""

import resource
import sys
import time
from pathlib import Path
from typing import Any

from datamodules.tokenizers import Tokenizer
from datamodules.tokens import token_cache
from datamodules.utils.errors import DataError
from tests.helpers.corpora import corpus


def main(how: str, path: str) -> None:
    token_cache.CHARACTERS_PER_CORE = 1  # a piece at a time
    data = corpus(Path(path))
    assert data.tokenizer.vocab_size  # trained before what follows
    encode = Tokenizer.encode_concatenated
    calls: list[int] = []

    def slow(*args: Any) -> Any:
        calls.append(1)
        if how == "kill" and len(calls) == 3:
            print("writing", flush=True)
            time.sleep(60)
        return encode(*args)

    Tokenizer.encode_concatenated = slow  # type: ignore[method-assign]
    if how == "full":  # as a disk without more room than that
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        data.setup("fit")
    except DataError as error:
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
