"""`consolidate`: one file from a checkpoint whose parts several processes wrote into a folder."""

from pathlib import Path

import torch

from tasks.checkpoints.exporting import new_file
from tasks.checkpoints.reading import KEY, META, is_sharded, old_path, read_checkpoint, recover
from tasks.checkpoints.sharded import gathered
from tasks.errors import UsageError


def consolidate(ckpt_path: str, output: str | None = None) -> None:
    """Make one file of a checkpoint in parts, which --ckpt_path then reads.

    Args:
        ckpt_path: Folder that `fit` wrote as a checkpoint, such as RUN_DIR/checkpoints/last.ckpt.
        output: File to write; null puts it in the folder's place, and the folder becomes NAME.parts.

    Raises:
        UsageError: it is not in parts, not a checkpoint of this project, or it holds code.
        RunError: a part is missing or damaged.
    """
    folder = Path(ckpt_path)
    recover(folder)
    refuse(folder)
    target = Path(output) if output else folder.with_name(f"{folder.name}.whole")
    kept = folder.with_name(f"{folder.name}.parts")
    if not output and kept.exists():
        raise UsageError(
            f"{kept}, which --ckpt_path would become, is there already: remove it, or give --output"
        )
    if target.is_dir():
        raise UsageError(f"--output {output} is a folder: give the name of a file")
    checkpoint = gathered(folder)
    with new_file(target) as partial:
        torch.save(checkpoint, partial)
    if not output:
        folder.replace(old_path(folder))
        target = target.replace(folder)
        old_path(folder).replace(kept)
    print(f"wrote {target}\npython -m tasks.{checkpoint[KEY]['task']} test --ckpt_path {target}")


def refuse(path: Path) -> None:
    """Refuse what is no checkpoint in parts, and say what it is.

    Raises:
        UsageError: see above.
        RunError: it is a file that is truncated, corrupt or something else.
    """
    if not path.exists():
        raise UsageError(
            f"--ckpt_path {path}: no such folder; with parts, `fit` writes RUN_DIR/checkpoints/last.ckpt"
        )
    if path.is_file():
        task = read_checkpoint(path)[KEY]["task"]
        raise UsageError(
            f"--ckpt_path {path} is one file already: `python -m tasks.{task} test --ckpt_path {path}`"
        )
    if not is_sharded(path):
        names = sorted(str(found.parent) for found in path.glob(f"**/*.ckpt/{META}"))
        there = (
            f"there is {', '.join(names)}"
            if names
            else "`fit` writes RUN_DIR/checkpoints/last.ckpt"
        )
        raise UsageError(
            f"--ckpt_path {path} is a folder without a checkpoint's parts (no {META} in it): {there}"
        )
