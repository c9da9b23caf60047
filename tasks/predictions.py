"""What is predicted for an input, and the files that `predict` writes."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from datamodules.utils.files import replacing, write_text
from tasks.checkpoints.exporting import check_writable
from tasks.errors import UsageError
from tasks.tracking.csv_files import Columns, text_cell, unique_names, without_names, write_csv
from tasks.tracking.run_folder import make_folder


def most_likely(names: Sequence[str], probabilities: Tensor) -> dict[str, float]:
    """K classes with their probabilities, (K,) on the CPU, the most likely first."""
    values, order = probabilities.sort(descending=True, stable=True)  # (K,) each
    return {names[i]: p for i, p in zip(order.tolist(), values.tolist(), strict=True)}


class BasePrediction(ABC):
    """Base: what was predicted for one input."""

    @abstractmethod
    def row(self, names: Sequence[str], top_k: int | None = None) -> list[tuple[str, Any]]:
        """Column names and cells of a row of a table.

        Args:
            names: Of the K classes, in the order of the columns.
            top_k: The k most likely classes only; None: all.
        """

    @abstractmethod
    def entry(self, top_k: int | None = None) -> dict[str, Any]:
        """An object of JSON."""

    @abstractmethod
    def line(self, top_k: int | None = None) -> str:
        """The answer for one input, in a line to print."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """The answer without the probabilities of other classes, by name."""


class RankedPrediction(BasePrediction):
    """Base: classes or labels with their probabilities."""

    probabilities: dict[str, float]  # by name, the most likely first

    def top(self, k: int | None) -> list[tuple[str, float]]:
        """The k most likely classes with their probabilities; None: all."""
        return list(self.probabilities.items())[:k]

    def top_columns(self, top_k: int, first: int = 1) -> list[tuple[str, Any]]:
        """Column names and cells of the k most likely classes from rank `first` on."""
        found: list[tuple[str, Any]] = []
        for rank, (name, probability) in enumerate(self.top(top_k), 1):
            if rank >= first:
                found += [(f"label_{rank}", name), (f"probability_{rank}", probability)]
        return found


@dataclass(frozen=True)
class Prediction(RankedPrediction):
    """The classes of one input.

    Args:
        label: The most likely class.
        probability: Its probability.
        probabilities: Of all classes by name, the most likely first.
    """

    label: str
    probability: float
    probabilities: dict[str, float]

    def row(self, names: Sequence[str], top_k: int | None = None) -> list[tuple[str, Any]]:
        if top_k is None:
            return [("label", self.label), *((name, self.probabilities[name]) for name in names)]
        return [*self.answer().items(), *self.top_columns(top_k, first=2)]

    def entry(self, top_k: int | None = None) -> dict[str, Any]:
        return {"label": self.label, "probabilities": round_probabilities(self.top(top_k))}

    def line(self, top_k: int | None = None) -> str:
        """As in `label cat (probabilities: cat 0.9000, dog 0.1000)`."""
        return f"label {self.label} (probabilities: {format_probabilities(self.top(top_k))})"

    def answer(self) -> dict[str, Any]:
        return {"label": self.label, "probability": self.probability}


@dataclass(frozen=True)
class LabelSet(RankedPrediction):
    """The labels of one input that may have several.

    Args:
        labels: Those with a probability above 0.5, the most likely first.
        probabilities: Of all labels by name, the most likely first.
    """

    labels: list[str]
    probabilities: dict[str, float]

    def row(self, names: Sequence[str], top_k: int | None = None) -> list[tuple[str, Any]]:
        labels = [*self.answer().items()]
        if top_k is None:
            return labels + [(name, self.probabilities[name]) for name in names]
        return labels + self.top_columns(top_k)

    def entry(self, top_k: int | None = None) -> dict[str, Any]:
        return {"labels": self.labels, "probabilities": round_probabilities(self.top(top_k))}

    def line(self, top_k: int | None = None) -> str:
        """As in `labels war, art (probabilities: war 0.9000, art 0.7000, love 0.1000)`."""
        names = f"labels {', '.join(self.labels)}" if self.labels else "no label"
        return f"{names} (probabilities: {format_probabilities(self.top(top_k))})"

    def answer(self) -> dict[str, Any]:
        return {"labels": ",".join(self.labels)}


@dataclass(frozen=True)
class Number(BasePrediction):
    """The number of one input.

    Args:
        value: In the unit of the training data.
    """

    value: float

    def row(self, names: Sequence[str], top_k: int | None = None) -> list[tuple[str, Any]]:
        return [*self.answer().items()]

    def entry(self, top_k: int | None = None) -> dict[str, Any]:
        return {"prediction": float(f"{self.value:.7g}")}  # float32 has about seven

    def line(self, top_k: int | None = None) -> str:
        return f"{self.value:.6g}"

    def answer(self) -> dict[str, Any]:
        return {"prediction": self.value}


AnyPrediction = Prediction | LabelSet | Number


def round_probabilities(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    return {name: round(probability, 6) for name, probability in pairs}


def format_probabilities(pairs: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {probability:.4f}" for name, probability in pairs)


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text.

    Args:
        loss: Mean cross entropy of a token, in nats.
        perplexity: exp(loss).
        bits_per_byte: Bits that the model needs for a byte of UTF-8.
        tokens: Number of tokens that were predicted.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int

    @classmethod
    def of(cls, loss: float, tokens: int, num_bytes: int) -> "Score":
        """Returns the score from the sum of the losses of all tokens, and the bytes they encode."""
        mean = loss / tokens
        bits = loss / math.log(2)
        return cls(mean, math.exp(mean), bits / max(1, num_bytes), tokens)


@dataclass(frozen=True)
class PredictionFile:
    """Where and how predictions are written.

    Args:
        path: The file: .csv, .jsonl (an object per line, with the probabilities in one of its
            own), .json (a list of such objects) or .parquet. Its folder is created if it does not
            exist.
        top_k: Write the k most likely classes with their probabilities; None: the most likely
            class and the probabilities of all.
        key: Of the checkpoint and the options, as `tasks.distributed.predicting.fingerprint`, if a
            command that was killed can be resumed.
        is_default: No name was given: answers for `--text` and for an image are printed only.
    """

    path: Path
    top_k: int | None = None
    key: str = ""
    is_default: bool = False

    def __post_init__(self) -> None:
        if self.path.suffix not in FORMATS:
            raise UsageError(
                f"--output {self.path}: give a name that ends in {' or '.join(FORMATS)}"
            )
        if self.path.is_dir():
            raise UsageError(f"--output {self.path} is a folder: give the name of a file to write")

    @property
    def part(self) -> Path | None:
        """The hidden file beside it that holds the predictions until it is written, with a key."""
        return self.path.with_name(f".{self.path.name}.part") if self.key else None

    def check_default(self) -> None:
        """Raises `UsageError` if no file was named, and the default one cannot be written.

        It also does so if that file holds the results of a run's test.
        """
        if not self.is_default:
            return
        check_writable(self.path.parent, "--output")
        if self.path.exists() and Path("config.yaml").exists():
            raise UsageError(
                f"this is a run folder, whose {self.path} has the results of its test: name "
                "another file with --output"
            )

    def write(
        self,
        column: str,
        samples: Sequence[str],
        names: Sequence[str],
        found: Sequence[BasePrediction],
        others: Mapping[str, Sequence[Any]] = {},
    ) -> None:
        """Writes a row for each sample, and removes the part file.

        Args:
            column: Name of the first column, such as "text".
            samples: Texts or paths.
            names: Of the K classes.
            found: What was predicted for each.
            others: More columns, which stand last. One that is named like a column of the
                predictions is left out.
        """
        make_folder(self.path.parent, "--output")
        pairs = zip(samples, found, strict=True)
        if self.path.suffix in (".json", ".jsonl"):
            entries = [{column: sample, **one.entry(self.top_k)} for sample, one in pairs]
            for name, cells in others.items():
                for entry, cell in zip(entries, cells, strict=True):
                    entry.setdefault(name, cell)
            write_json(self.path, entries)
        else:
            rows = [[(column, sample), *one.row(names, self.top_k)] for sample, one in pairs]
            header = unique_names([name for name, _ in rows[0]])
            columns = [[cell for _, cell in cells] for cells in zip(*rows, strict=True)]
            if self.path.suffix == ".csv" and isinstance(found[0], Number):
                columns[1] = [f"{value:.7g}" for value in columns[1]]  # float32 has about seven
            WRITERS[self.path.suffix](self.path, header, columns, others)
        if self.part is not None:
            self.part.unlink(missing_ok=True)


def write_parquet(
    path: Path, header: Sequence[str], columns: Sequence[Sequence[Any]], others: Columns
) -> None:
    """As `write_csv`, with all digits."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    more = without_names(others, header)
    arrays = []
    for column in (*columns, *more.values()):
        try:
            array = pa.array(column)
        except (ValueError, TypeError, OverflowError):  # cells of several types
            array = None
        if array is None or "struct<" in str(array.type):  # all rows would have the same entries
            array = pa.array([None if cell is None else text_cell(cell) for cell in column])
        arrays.append(array)
    with replacing(path) as partial:
        pq.write_table(pa.Table.from_arrays(arrays, names=[*header, *more]), partial)


WRITERS: dict[str, Callable[[Path, Sequence[str], Sequence[Sequence[Any]], Columns], None]] = {
    ".csv": write_csv,
    ".parquet": write_parquet,
}
FORMATS = (".csv", ".json", ".jsonl", ".parquet")


def write_json(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Writes an object per line; in a .json file they are a list."""
    # Dates and the like of other columns become text.
    lines = [json.dumps(finite(entry), ensure_ascii=False, default=str) for entry in entries]
    is_list = path.suffix == ".json"
    text = ",\n".join(lines) if is_list else "\n".join(lines)
    write_text(path, f"[\n{text}\n]\n" if is_list else f"{text}\n")


def finite(value: Any) -> Any:
    """The same with null for infinity and NaN, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
