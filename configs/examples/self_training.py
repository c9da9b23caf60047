"""Self-training (Yarowsky 1995): a classifier labels texts that another one learns from.

    python -m configs.examples.self_training TEACHER FOLDER OUTPUT

TEACHER is a run folder of `python -m tasks.bert fit`. FOLDER has train-*.parquet, test-*.parquet
and unsupervised-*.parquet with the columns `text` and `label`, as IMDB of the hub. The teacher
labels the reviews that have no label. OUTPUT gets a training split with all labelled texts and
those of which the teacher is sure, and a validation and a test split, for `--data.path OUTPUT`.
All steps for IMDB, from masked-LM pretraining on all reviews:

    export TESSERA_DATA=FOLDER_ABOVE_IMDB
    python -m tasks.mlm fit --config configs/mlm/imdb_cpu.yaml --run_dir runs/pretrained
    python -m tasks.bert fit --config configs/bert/imdb_cpu.yaml --run_dir runs/teacher \
        --model.optimizer.lr 1.0e-3 --model.pretrained runs/pretrained --trainer.max_epochs 3
    python -m configs.examples.self_training runs/teacher $TESSERA_DATA/imdb runs/more_reviews
    python -m tasks.bert fit --config configs/bert/imdb_cpu.yaml --data.path runs/more_reviews \
        --data.dataset.name null --data.dataset.local null \
        --model.optimizer.lr 1.0e-3 --model.pretrained runs/pretrained --trainer.max_epochs 2

`configs/README.md` has accuracies of teachers and students.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tessera

SURE = 0.8  # the least probability of a label that is used
HELD_OUT = 0.08  # of the labelled texts, for validation; the teacher has read most of them
Split = dict[str, list[str]]  # the columns "text" and "label"


def read(folder: Path, split: str, class_names: list[str]) -> Split:
    """Texts of a split and the names of their classes; those without a class have none."""
    files = sorted(folder.rglob(f"{split}-*.parquet"))
    if not files:
        sys.exit(f"error: {folder} has no {split}-*.parquet: give the folder of IMDB as FOLDER")
    table = pa.concat_tables(pq.read_table(file, columns=["text", "label"]) for file in files)
    labels = table["label"].to_pylist()  # class indices; -1: unlabelled
    names = [class_names[label] if label >= 0 else "" for label in labels]
    return {"text": table["text"].to_pylist(), "label": names}


def select(split: Split, chosen: np.ndarray) -> Split:
    """The rows of a split where a mask (N,) is true."""
    rows = np.flatnonzero(chosen)
    return {name: [column[row] for row in rows] for name, column in split.items()}


def sure_labels(model: tessera.TextClassifier, texts: list[str]) -> Split:
    """Labels texts and keeps those whose most likely class has a probability of `SURE` or more."""
    labels, sure = [], []
    for prediction in model.predict(texts):
        assert isinstance(prediction, tessera.Prediction)  # not of several labels
        labels.append(prediction.label)
        sure.append(prediction.probability >= SURE)
    return select({"text": texts, "label": labels}, np.array(sure))


def main(teacher: str, folder: Path, output: Path) -> None:
    if output.exists():
        sys.exit(f"error: {output} exists: give another OUTPUT")
    model = tessera.load(teacher)
    if not isinstance(model, tessera.TextClassifier):
        sys.exit(f"error: {teacher} is not a classifier of texts: give a run folder of tasks.bert")
    names = model.metadata["class_names"]
    labelled, test = (read(folder, split, names) for split in ("train", "test"))
    unlabelled = read(folder, "unsupervised", names)["text"]
    print(f"labelling {len(unlabelled):,} texts", flush=True)
    added = sure_labels(model, unlabelled)

    held_out = np.random.default_rng(0).random(len(labelled["text"])) < HELD_OUT
    train = select(labelled, ~held_out)
    splits = {
        "train": {name: train[name] + added[name] for name in train},
        "validation": select(labelled, held_out),
        "test": test,
    }
    output.mkdir(parents=True)
    for split, columns in splits.items():
        pq.write_table(pa.table(columns), output / f"{split}.parquet")
    counts = ", ".join(f"{count:,} {name}" for name, count in Counter(added["label"]).items())
    print(f"the teacher is sure of {len(added['text']):,} texts: {counts}")
    print(f"{len(splits['train']['text']):,} training texts are in {output}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("error: give TEACHER, FOLDER and OUTPUT")
    try:
        main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    except (tessera.UsageError, tessera.DataError, tessera.RunError) as error:
        sys.exit(f"error: {error}")
