"""What a linear model reaches on IMDB: logistic regression on TF-IDF of words and pairs of words (scikit-learn).

    TESSERA_DATA=FOLDER python -m tests.benchmarks.imdb_baseline

Split as `configs/bert/imdb_cpu.yaml` does it: 22,500 reviews to learn from, 2,500 to choose the regularisation by, and
once the 25,000 test reviews.
"""

import argparse
import os
import time
from pathlib import Path

from datamodules.reviews import ReviewData
from datamodules.sources import TextDatasetOptions

STRENGTHS = (1, 3, 10, 30, 100)  # C: the inverse of the regularisation


def main() -> None:
    """Parses the command line and prints accuracies."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "").parse_args()
    if "TESSERA_DATA" not in os.environ:
        raise SystemExit("TESSERA_DATA is not set: it names the folder that holds imdb/.")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    start = time.perf_counter()
    options = TextDatasetOptions(name="stanfordnlp/imdb", local="imdb")
    source = ReviewData(
        source="hub", path=str(Path(os.environ["TESSERA_DATA"], "imdb")), dataset=options
    ).source
    texts = {split: source.split(split) for split in ("train", "val", "test")}
    bags = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    bags.fit(texts["train"].column.to_pylist())
    x = {split: bags.transform(part.column.to_pylist()) for split, part in texts.items()}
    y = {split: part.labels.numpy() for split, part in texts.items()}
    best, best_score = None, 0.0
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=1000).fit(x["train"], y["train"])
        score = float(model.score(x["val"], y["val"]))
        print(f"C {strength:<4} validation accuracy {score:.4f}")
        if score > best_score:
            best, best_score = model, score
    assert best is not None
    print(
        f"test accuracy {best.score(x['test'], y['test']):.4f}, {time.perf_counter() - start:.0f} s in all"
    )


if __name__ == "__main__":
    main()
