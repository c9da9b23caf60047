"""Tokenising IMDB's 75,000 training reviews, labelled or not, beside `encode_batch` of the package `tokenizers` alone.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.tokenise

Both use one WordPiece tokenizer of 16,000 tokens, trained on the labelled reviews, and all cores. Theirs gets
lists of strings, a thousand texts at a time, and drops the results. Ours begins with the Arrow column that was read
from the files, and ends with the finished table of tokens on disk, opened and checked. Measured in turns (A B A B ...).
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks._compare import command_line, interleave, table

VOCABULARY, THOUSAND = 16_000, 1000
SPLITS = ("train", "unsupervised")


def reviews(*splits: str) -> Any:
    """The reviews of the splits as one Arrow column."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = Path(os.environ["TESSERA_DATA"], "imdb")
    parts = [
        parquet.read_table(folder / f"{split}-00000-of-00001.parquet").column("text")
        for split in splits
    ]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks])


def theirs() -> Callable[[], int]:
    """The package alone: the function that tokenises all, and returns how many texts that were."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.environ["TESSERA_TOKENIZER"])
    texts = reviews(*SPLITS).to_pylist()

    def run() -> int:
        for start in range(0, len(texts), THOUSAND):
            tokenizer.encode_batch(texts[start : start + THOUSAND])
        return len(texts)

    return run


def ours() -> Callable[[], int]:
    """The same through the token cache, which is empty each time."""
    from datamodules.tokenizers import Tokenizer
    from datamodules.tokens.token_cache import tokenised

    texts = reviews(*SPLITS)

    def run() -> int:
        written = tokenised(texts, Tokenizer.from_file(os.environ["TESSERA_TOKENIZER"]))
        written.path.unlink()
        return len(written)

    return run


COMPETITORS = {"tokenizers": theirs, "tessera": ours}


def main() -> None:
    """Parses the command line, trains the tokenizer and prints the table."""
    options = command_line(__doc__ or "", COMPETITORS, 5)
    from datamodules.tokenizers import Tokenizer, TokenizerConfig

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        tokenizer = Tokenizer.train(reviews("train"), TokenizerConfig(vocabulary=VOCABULARY))
        print(f"trained on 25,000 reviews in {time.perf_counter() - start:.1f} s")
        file = Path(folder, "tokenizer.json")
        file.write_text(tokenizer.to_json())
        os.environ |= {"TESSERA_CACHE": folder, "TESSERA_TOKENIZER": str(file)}
        results = interleave("tests.benchmarks.tokenise", list(COMPETITORS), options.rounds)
    print(table(results, "reviews/s", "tokenizers"))
    print(f"time of ours / theirs: {results['tokenizers'].median / results['tessera'].median:.2f}")


if __name__ == "__main__":
    main()
