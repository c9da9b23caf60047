"""`consolidate`: one file from a checkpoint whose parts several processes wrote into a folder."""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tasks.checkpoints import KEY, META, Checkpoint, in_parts, load_tensors, numbered
from tasks.errors import RunError, UsageError
from tasks.exporting import new_file

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
        with open(self._get_metadata_path(), "rb") as file:
            metadata: Metadata = Descriptions(file).load()
        if any(Path(place.relative_path).name != place.relative_path for place in metadata.storage_data.values()):
            raise pickle.UnpicklingError("a part outside of the folder")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(_EmptyStateDictLoadPlanner):
    """Torch's planner for reading everything, without running code that is in it."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Take over a value that is no tensor."""
        plain = BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # refuses code; what is saved now has none
        plain.seek(0)
        super().load_bytes(read_item, plain)


def consolidate(ckpt_path: str, output: str | None = None) -> None:
    """Make one file of a checkpoint in parts, which --ckpt_path and --resume then read.

    Args:
        ckpt_path: Folder that `fit` wrote as a checkpoint, such as RUN_DIR/checkpoints/last.ckpt.
        output: File to write; null puts it in the folder's place, and the folder becomes NAME.parts.

    Raises:
        UsageError: it is not in parts, not a checkpoint of this project, or it holds code.
        RunError: a part is missing or damaged.
    """
    folder = Path(ckpt_path)
    if not in_parts(folder):
        raise UsageError(f"--ckpt_path {ckpt_path} is no folder of a checkpoint's parts (no {META} in it)")
    target = Path(output) if output else folder.with_name(f"{folder.name}.whole")
    if target.is_dir():
        raise UsageError(f"--output {output} is a folder: give the name of a file")
    checkpoint = gathered(folder)
    if KEY not in checkpoint:
        raise UsageError(f"--ckpt_path {ckpt_path} is not a Tessera checkpoint: give a folder that `fit` wrote")
    with new_file(target) as partial:
        torch.save(checkpoint, partial)
    if not output:
        folder.replace(folder.with_name(f"{folder.name}.parts"))
        target = target.replace(folder)
    print(f"wrote {target}\npython -m tasks.{checkpoint[KEY]['task']} test --ckpt_path {target}")


def gathered(folder: Path) -> Checkpoint:
    """The whole checkpoint of a folder, as one process would have written it.

    Raises:
        UsageError: it holds code.
        RunError: a part is missing or damaged.
    """
    what, state = f"checkpoint '{folder}'", Checkpoint()
    meta: Checkpoint = load_tensors(folder / META, what)
    try:
        reader = Reader(folder)
        reader.read_metadata()  # torch would tell of what is wrong with it in a long log
        _load_state_dict(state, storage_reader=reader, planner=Planner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # whatever bytes make of the unpickler
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if any(isinstance(cause, pickle.UnpicklingError) for cause in causes):
            raise UsageError(f"{what} holds other things than tensors and primitives, so it is refused") from error
        raise RunError(f"{what} lacks a part, or one is damaged: {causes[0]}") from error
    optimizers = [state[name] for name in sorted(state) if name.startswith("optimizer_")]
    weights = state.get("state_dict", state.get("model"))  # of Lightning's strategies, FSDP's calls them so
    return meta | {"state_dict": weights, "optimizer_states": [numbered(one) for one in optimizers]}
