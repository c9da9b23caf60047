"""Checkpoints in parts, a folder that several processes write together: read without running code that is in them."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from datamodules.utils.files import open_regular
from tasks.checkpoints.reading import (
    META,
    Checkpoint,
    by_index,
    check_checkpoint,
    check_finite,
    damaged_part,
    is_sharded,
    load_tensors,
)
from tasks.errors import RunError, UsageError

DESCRIPTIONS = {  # of which parts there are, by module: all that may be in the pickle that holds them
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # of Python 3.13
}  # fmt: skip


class Descriptions(pickle.Unpickler):
    """Reads what torch describes parts with, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name.

        Raises:
            UnpicklingError: it describes no parts.
        """
        if name in DESCRIPTIONS.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


class Reader(FileSystemReader):
    """Torch's reader of parts, without running code that is in them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which parts there are, and where."""
        with open_regular(self._get_metadata_path()) as file:
            metadata: Metadata = Descriptions(file).load()
        if any(
            Path(place.relative_path).name != place.relative_path
            for place in metadata.storage_data.values()
        ):
            raise pickle.UnpicklingError("a part outside of the folder")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """Torch's planner for reading what this process needs, without running code that is in it."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Take over a value that is no tensor."""
        plain = BytesIO()
        torch.save(
            torch.load(value, weights_only=True), plain
        )  # refuses code; what is saved now has none
        plain.seek(0)
        super().load_bytes(read_item, plain)


class WholePlanner(Planner, _EmptyStateDictLoadPlanner):
    """The same for reading everything."""


def causes(error: BaseException) -> list[BaseException]:
    """What went wrong, in each process where torch says so."""
    found = (
        [cause for cause, _ in error.failures.values()]
        if isinstance(error, CheckpointException)
        else []
    )
    return found or [error]


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """What goes wrong inside is about the parts in this folder.

    Raises:
        UsageError: they hold code.
        RunError: one is missing or damaged.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # whatever bytes make of the unpickler
        what, found = f"checkpoint '{folder}'", causes(error)
        if any(isinstance(cause, pickle.UnpicklingError) for cause in found):
            raise UsageError(
                f"{what} holds other things than tensors and primitives, so it is refused"
            ) from error
        raise RunError(f"{what} lacks a part, or one is damaged: {found[0]}") from error


def read_parts(folder: Path, task: str | None = None) -> Checkpoint:
    """What a checkpoint holds beside its parts, all of which are there and whole.

    Args:
        folder: the checkpoint.
        task: task it must belong to, such as "vit"; None for any.

    Returns:
        It has zeros for weights, which take no memory, and nothing of the optimizers.

    Raises:
        UsageError: not a checkpoint of this project or of another task, or it holds code.
        RunError: a part is missing or damaged.
    """
    if not is_sharded(folder):
        raise RunError(f"checkpoint '{folder}' lacks its {META}")
    checkpoint: Checkpoint = load_tensors(folder / META, f"checkpoint '{folder}'")
    with reading(folder):
        metadata = Reader(folder).read_metadata()
        for place in metadata.storage_data.values():
            with open_regular(folder / place.relative_path) as file:
                file.seek(place.offset)
                if damaged_part(BytesIO(file.read(place.length))):
                    raise RunError(f"{place.relative_path} is not what was written")
        zeros = {
            name.removeprefix("state_dict."): torch.zeros((), dtype=found.properties.dtype).expand(
                found.size
            )
            for name, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata) and not name.startswith("optimizer_")
        }
    return check_checkpoint(checkpoint | {"state_dict": zeros}, folder, task)


def load_parts(folder: Path, state: dict[str, Any]) -> None:
    """Read into the tensors of `state`, in every process, the parts of them that it holds; their number may differ.

    Raises:
        UsageError: they hold code.
        RunError: a part is missing or damaged.
    """
    with reading(folder):
        load(state, storage_reader=Reader(folder), planner=Planner())


def gathered(folder: Path) -> Checkpoint:
    """The whole checkpoint of a folder, as one process would have written it.

    Raises:
        UsageError: not a checkpoint of this project, or it holds code.
        RunError: a part is missing or damaged.
    """
    checkpoint, state = read_parts(folder), Checkpoint()
    with reading(folder):
        _load_state_dict(state, storage_reader=Reader(folder), planner=WholePlanner(), no_dist=True)
    optimizers = [state[name] for name in sorted(state) if name.startswith("optimizer_")]
    weights = (
        state.get("state_dict") or state["model"]
    )  # of Lightning's strategies, FSDP's calls them so
    check_finite(weights, f"checkpoint '{folder}'")
    return checkpoint | {
        "state_dict": weights,
        "optimizer_states": [by_index(one) for one in optimizers],
    }
