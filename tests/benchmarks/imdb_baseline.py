"""What a linear model reaches on IMDB: logistic regression on TF-IDF of words and pairs of words.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.imdb_baseline

Split as in `configs/bert/imdb_cpu.yaml`: 22,500 reviews for training, 2,500 to choose the
regularisation by, and once the 25,000 test reviews. The model is scikit-learn's.
"""

import time

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from datamodules.reviews import ReviewData
from datamodules.sources import TextDatasetOptions
from tests.benchmarks import _compare


def main() -> None:
    """Prints accuracies."""
    parser = _compare.arguments(__doc__)
    parser.add_argument("--every", type=int, default=1, help="use every n-th review")
    every = parser.parse_args().every
    folder = str(_compare.data_folder("imdb"))
    print(_compare.machine(), flush=True)
    start = time.perf_counter()
    options = TextDatasetOptions(name="stanfordnlp/imdb", local="imdb")
    source = ReviewData(source="hub", path=folder, dataset=options).source
    texts = {split: source.split(split) for split in ("train", "val", "test")}
    features = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    words = {split: part.column.to_pylist()[::every] for split, part in texts.items()}
    features.fit(words["train"])
    x = {split: features.transform(part) for split, part in words.items()}
    y = {split: part.labels.numpy()[::every] for split, part in texts.items()}
    models = {}
    for inverse in (1, 3, 10, 30, 100):  # of the regularisation
        model = LogisticRegression(C=inverse, max_iter=1000).fit(x["train"], y["train"])
        score = float(model.score(x["val"], y["val"]))
        print(f"C {inverse:<4} validation accuracy {score:.4f}")
        models.setdefault(score, model)
    best = models[max(models)]
    seconds = time.perf_counter() - start
    print(f"test accuracy {best.score(x['test'], y['test']):.4f}, {seconds:.0f} s in all")


if __name__ == "__main__":
    main()
