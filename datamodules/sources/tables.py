"""Tables by split, from the Hugging Face hub or a local copy of its files, with a column of classes."""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from datamodules.sources.base import S, Source, listed, other_source
from datamodules.sources.texts import holds_text, is_utf8
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import open_regular, problem, regular_files
from datamodules.utils.splits import split_of

MOST = 10**6  # whole numbers from here on are no classes
NUMBER = re.compile(r"[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


class Tables:
    """Base: Arrow tables by split.

    Args:
        path: File or folder that the user named, or None.
        options: Those of the source; they name the data set on the hub, where it is one.
        bad: Called with the name of a row and what is wrong with it; raises, or returns where such rows are left out.
        check: What is wrong with the cells of a JSON object that are used; None if nothing is.
    """

    unit = "row"  # what a row is called in messages
    endings: tuple[str, ...]  # of files, in lower case

    def __init__(
        self,
        path: str | None,
        options: Any,
        bad: Callable[[str, str], None],
        check: Callable[[Mapping[str, Any]], str | None] = lambda row: None,
    ) -> None:
        self.path, self.options, self.bad, self.check = path, options, bad, check

    @property
    def origin(self) -> str:
        """Where the tables come from: a path or a hub id."""
        raise NotImplementedError

    def splits(self) -> list[str]:
        """The splits there are."""
        raise NotImplementedError

    def hint(self, path: Path) -> str:
        """Which source reads what lies at `path`, as the end of a sentence; empty where none does."""
        return other_source(path, self.endings)

    def table(self, split: str) -> Any:
        """Arrow table of a split that exists; the columns keep the hub's description in their schema."""
        raise NotImplementedError

    def rows(self, split: str) -> Tensor:
        """(S,) int64: by what number a message names each row."""
        return torch.arange(self.table(split).num_rows)

    def where(self, split: str) -> str:
        """What the rows of a split are part of, for messages."""
        return f"the {split} split of {self.origin}"


class HubTables(Tables):
    """A data set of the Hugging Face hub, or a local folder of the same schema (parquet or arrow, named by split)."""

    endings = (".parquet", ".arrow")

    @cached_property
    def folder(self) -> Path | None:
        """The local folder to read instead of the hub, if there is one."""
        if self.path is not None:
            folder = Path(self.path)
            if not folder.is_dir():
                fault = problem(folder) or "is a file"
                raise UsageError(
                    f"{folder} {fault}: --data.path takes a folder of parquet files named by split, such as "
                    f"train-00000-of-00001.parquet{self.hint(folder)}."
                )
            return folder
        at_hand = os.environ.get("TESSERA_DATA")
        if at_hand and self.options.local and (Path(at_hand) / self.options.local).is_dir():
            return Path(at_hand) / self.options.local
        if self.options.name is None:
            raise UsageError(
                "the source hub needs --data.dataset.name ID (uoft-cs/cifar10) or --data.path FOLDER."
            )
        return None

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The local files of each split."""
        assert self.folder is not None
        files: dict[str, list[Path]] = {}
        for path in regular_files(self.folder, self.bad, lambda path: path.suffix in self.endings):
            if split := split_of(path.relative_to(self.folder)):
                files.setdefault(split, []).append(path)
        if not files:
            raise UsageError(
                f"{self.folder} holds no parquet or arrow files named by split, such as "
                f"train-00000-of-00001.parquet{self.hint(self.folder)}."
            )
        return files

    @cached_property
    def _tables(self) -> dict[str, Any]:
        return {} if self.folder is not None else _downloaded_tables(self.options)

    @property
    def origin(self) -> str:
        return str(self.folder or self.options.name)

    def splits(self) -> list[str]:
        return list(self._tables if self.folder is None else self.files)

    def table(self, split: str) -> Any:
        if split not in self._tables:  # a local split is read when first asked for
            import pyarrow as pa

            tables = [read_table(path) for path in self.files[split]]
            for path, table in zip(self.files[split], tables, strict=True):
                if not table.schema.equals(tables[0].schema):
                    first = self.files[split][0]
                    raise DataError(
                        f"{path} has other columns than {first}: write them alike, or remove one."
                    )
            self._tables[split] = pa.concat_tables(tables)
        return self._tables[split]


class TableSource(Source[S]):
    """Base of sources that are tables with a column of classes.

    The classes are those of the hub's description; else the values that the column holds in the training split, sorted;
    where these are words, `class_names` may name them in another order.
    """

    reader: type[Tables] = HubTables

    def __init__(self, path: str | None, options: Any, skip_bad: bool = False) -> None:
        super().__init__(path, options, skip_bad)
        self.tables = self.reader(path, options, self.bad, self.check)

    @property
    def origin(self) -> str:
        return self.tables.origin

    def prepare(self) -> None:
        self.tables.splits()

    def has(self, split: str) -> bool:
        return split in self.tables.splits()

    @property
    def class_names(self) -> list[str]:
        if not self.has("train") and self.known_names:
            return self.known_names
        if not self.has("train"):
            raise UsageError(
                f"{self.origin} has no train split, only {', '.join(self.tables.splits())}."
            )
        return self._described_names("train") or self._values

    def label_columns(self, table: Any) -> list[str]:
        """Names of the columns that may hold the classes where no option says which; the likeliest first."""
        features, names = features_of(table), table.column_names
        found = [n for n in ("label", "labels") if n in names]
        return found or [n for n in names if features.get(n, {}).get("_type") == "ClassLabel"]

    def label_column(self, table: Any) -> str:
        """Name of the column of classes.

        Raises:
            UsageError: There is none, or it holds neither text nor whole numbers.
        """
        name = self.column(table, "label_column", self.label_columns(table))
        if not holds_classes(kind := table.schema.field(name).type):
            others = [
                field.name
                for field in table.schema
                if holds_classes(field.type) and field.name != name
            ]
            raise UsageError(
                f"column {name} of {self.origin} holds {kind}, not classes: set {self.prefix}.label_column to one that "
                f"holds text or whole numbers ({', '.join(others) or 'there are none'})."
            )
        return name

    def cells(self, split: str) -> Any:
        """Arrow strings (S,): the label of each row, without spaces around it; null where there is none.

        Raises:
            DataError: One is not UTF-8, by its row.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        table = self.tables.table(split)
        cells = table.column(self.label_column(table)).cast(pa.string())
        if wrong := (~is_utf8(cells)).nonzero().flatten().tolist():
            self._refuse(
                split, wrong[0], "has a label with bytes that are not UTF-8: mend or remove it."
            )
        cells = pc.utf8_trim_whitespace(cells)
        return pc.if_else(pc.equal(cells, ""), pa.scalar(None, pa.string()), cells)

    def labels(self, split: str) -> Tensor:
        """(S,) int64: the class of each row.

        Raises:
            DataError: The split is empty, or a row has no label or one outside the classes; names the row.
        """
        found = self.places(split)
        if len(found) == 0:
            raise DataError(f"{self.tables.where(split)} is empty.")
        if self._derived and (value := next(filter(is_no_class, self._values), None)):
            rows = (found == self._values.index(value)).nonzero().flatten().tolist()
            if rows:
                fault = f"has the label {value[:40]}, but classes are words or whole numbers from 0 to {MOST - 1:,}"
                advice = f"mend or remove it, or name all classes with {self.prefix}.class_names."
                self._refuse(split, rows[0], f"{fault}: {advice}")
        unknown = (found == len(self._values)).nonzero().flatten().tolist()
        if unknown:
            cell = self.cells(split)[unknown[0]].as_py()
            fault = (
                "has no label, but needs one"
                if cell is None
                else f"has the label {cell}, which is none"
            )
            classes = f"of the {len(self._values)} classes: {listed(self.class_names)}."
            self._refuse(split, unknown[0], f"{fault} {classes}")
        return found

    def _refuse(self, split: str, i: int, fault: str) -> NoReturn:
        row = int(self.tables.rows(split)[i])
        raise DataError(f"{self.tables.unit} {row} of {self.tables.where(split)} {fault}")

    def places(self, split: str) -> Tensor:
        """(S,) int64: the place of each row's label among the K classes; K for a label that is none of them."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = pc.index_in(self.cells(split), pa.array(self._values, pa.string())).fill_null(
            len(self._values)
        )
        return torch.from_numpy(found.to_numpy().astype("int64"))

    def _described_names(self, split: str) -> list[str]:
        table = self.tables.table(split)
        names = features_of(table).get(self.label_column(table), {}).get("names")
        return [str(name) for name in names or ()]

    @property
    def _derived(self) -> bool:
        """Whether nothing says what the classes are but the labels of the training split."""
        return (
            not self.options.class_names
            and self.has("train")
            and not self._described_names("train")
        )

    @cached_property
    def _values(self) -> list[str]:
        """What the column holds for class 0, 1, ..., as text."""
        split = "train" if self.has("train") else self.tables.splits()[0]
        if names := self._described_names(split):
            return [str(i) for i in range(len(names))]
        found = self.cells(split).drop_null().unique().to_pylist()
        numbers = all(re.fullmatch("-?[0-9]{1,18}", value) for value in found)
        known = self.options.class_names if self.has("train") else self.known_names
        if known and (not numbers or not self.has("train") and set(found) <= set(known)):
            return known
        if known and not self.has("train"):
            return [str(i) for i in range(len(known))]
        return sorted(found, key=int) if numbers else sorted(found)


def is_no_class(value: str) -> bool:
    """Whether a label is a number, but no whole one from 0 to `MOST`: a measure, a missing value or an id.

    >>> [value for value in ("good", "3", "-1", "0.5", "1e3", "1000000000000") if is_no_class(value)]
    ['-1', '0.5', '1e3', '1000000000000']
    """
    return NUMBER.fullmatch(value) is not None and not (
        value.isdecimal() and len(value.lstrip("0")) < len(str(MOST))
    )


def holds_classes(kind: Any) -> bool:
    """Whether an Arrow type is one of texts or whole numbers, or of nothing at all."""
    import pyarrow as pa

    return bool(holds_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind))


def features_of(table: Any) -> dict[str, Any]:
    """The hub's description of each column; empty where there is none.

    Raises:
        DataError: It is damaged.
    """
    described = (table.schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(described)["info"]["features"] if described else {}
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "the hub's description of the columns is damaged: fetch or write the file again."
        ) from error


def read_table(path: Path) -> Any:
    """An Arrow table from a regular file.

    Raises:
        DataError: It is damaged, or no regular file.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with open_regular(path):
            pass
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        with pa.memory_map(str(path)) as file:
            try:
                return pa.ipc.open_stream(file).read_all()
            except pa.ArrowInvalid:
                return pa.ipc.open_file(file).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read ({str(error).splitlines()[0][:99]}): fetch it again."
        ) from error


def _downloaded_tables(options: Any) -> dict[str, Any]:
    from datasets import load_dataset

    name, local = options.name or "", options.local
    logging.getLogger("huggingface_hub").setLevel(
        logging.ERROR
    )  # not a line for each of its retries
    try:
        splits = load_dataset(name, options.subset)
    except Exception as error:  # a dozen kinds, from sockets to the hub's own
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else 'no reason given'}"
        where = f", or set TESSERA_DATA to a folder that holds {local}/" if local else ""
        raise DataError(
            f"could not get {name} from the Hugging Face hub ({reason}); without network, put its parquet files into a "
            f"folder and name it with --data.path FOLDER{where}."
        ) from error
    tables = {}
    for key, part in splits.items():
        if split := split_of(Path(str(key))):
            tables[split] = part.data.table.replace_schema_metadata(
                part.features.arrow_schema.metadata
            )
    return tables
