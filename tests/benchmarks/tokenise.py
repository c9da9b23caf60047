"""Tokenising IMDB's 75,000 training reviews, beside the package `tokenizers` alone.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.tokenise [--texts 75000]

Both use one WordPiece tokenizer of 16,000 tokens, trained on the labelled reviews, and all cores.
`encode_batch` gets lists of strings, a thousand texts at a time, and drops the results. Ours begins
with the Arrow column that was read from the files, and ends with the finished table of tokens on
disk, opened and checked. Measured in turns.
"""

import os
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round

VOCABULARY = 16_000
AT_ONCE = 1000  # texts
SPLITS = ("train", "unsupervised")


def reviews(*splits: str) -> Any:
    """The reviews of the splits as one Arrow column."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = _compare.data_folder("imdb")
    files = [folder / f"{split}-00000-of-00001.parquet" for split in splits]
    columns = [parquet.read_table(file).column("text") for file in files]
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks])


def tokenizers(options: Namespace) -> Round:
    """Rounds of the package alone."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.environ["TESSERA_TOKENIZER"])
    texts = reviews(*SPLITS)[: options.texts].to_pylist()

    def run() -> int:
        for start in range(0, len(texts), AT_ONCE):
            tokenizer.encode_batch(texts[start : start + AT_ONCE])
        return len(texts)

    return run


def tessera(options: Namespace) -> Round:
    """Rounds with the token cache, which is empty each time."""
    from datamodules.tokenizers import Tokenizer
    from datamodules.tokens.token_cache import tokenised

    texts = reviews(*SPLITS)[: options.texts]

    def run() -> int:
        written = tokenised(texts, Tokenizer.from_file(os.environ["TESSERA_TOKENIZER"]))
        written.path.unlink()
        return len(written)

    return run


COMPETITORS = {"tokenizers": tokenizers, "tessera": tessera}


def main() -> None:
    """Parses the command line, trains the tokenizer and prints the table."""
    parser = _compare.arguments(__doc__, 5)
    parser.add_argument("--texts", type=int, default=75_000, help="number of reviews")
    options = _compare.parse(parser, COMPETITORS)
    from datamodules.tokenizers import Tokenizer, TokenizerConfig

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        labelled = reviews("train")[: options.texts]
        tokenizer = Tokenizer.train(labelled, TokenizerConfig(vocabulary=VOCABULARY))
        print(f"trained on {len(labelled):,} reviews in {time.perf_counter() - start:.1f} s")
        file = Path(folder, "tokenizer.json")
        file.write_text(tokenizer.to_json())
        os.environ |= {"TESSERA_CACHE": folder, "TESSERA_TOKENIZER": str(file)}
        results = _compare.interleave(COMPETITORS, options.rounds)
    print(_compare.table(results, "reviews/s"))
    print(f"time of ours / theirs: {results['tokenizers'].median / results['tessera'].median:.2f}")


if __name__ == "__main__":
    main()
