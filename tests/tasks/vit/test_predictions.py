"""Labels of images: as tables and JSON Lines, the likeliest classes, and of a column of paths."""

import csv
import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import tessera

from tests.helpers.command import Console
from tests.helpers.images import random_image


def test_formats_and_likeliest_classes(best: Path, console: Console) -> None:
    paths = ["photos/a.png", "photos/b.png"]
    for number, path in enumerate(paths):
        Path(path).parent.mkdir(exist_ok=True)
        random_image(number, (8, 8)).save(path)
    model = tessera.load(best, kind=tessera.ImageClassifier)
    column = pd.DataFrame({"path": paths}, index=[5, 2])["path"]
    expected = model.predict(column, top_k=2)
    for name in ("csv", "jsonl", "parquet"):
        line = f"predict --ckpt_path {best} --input photos --top_k 2"
        console.printed(f"{line} --output out.{name}")
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    entries = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    columns = pq.read_table("out.parquet").to_pylist()
    for found, row, entry, cells in zip(expected, rows, entries, columns, strict=True):
        assert isinstance(found, tessera.Prediction)
        assert row["label"] == entry["label"] == cells["label"] == found.label
        assert entry["probabilities"] == pytest.approx(found.probabilities, abs=2e-6)
        assert len(entry["probabilities"]) == 2
        for name, probability in found.probabilities.items():
            assert name in [*row.values()] and str(probability)[:5] in " ".join(row.values())
    assert [Path(row["path"]).name for row in rows] == ["a.png", "b.png"]
