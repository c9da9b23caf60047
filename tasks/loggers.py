"""Lightning's W&B and TensorBoard loggers, in runs that are continued, lose the network, or keep their checkpoints."""

import csv
import json
import os
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pytorch_lightning import loggers
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

STEP = "trainer/global_step"  # Lightning's name of W&B's x axis
LIMITS = {"init_timeout": 30.0, "finish_timeout": 300.0}  # seconds that W&B may keep a run waiting
HEADER = struct.Struct("<IHB")  # of a part of an entry of a .wandb file: checksum, length, kind
BLOCK, WHOLE, LAST = 32768, 1, 4


class TensorBoardLogger(loggers.TensorBoardLogger):
    """Lightning's; in a continued run readers drop what was logged after its checkpoint."""

    def go_on(self, folder: Path, step: int) -> None:
        """Go on where a checkpoint is; see `go_on` below."""
        self._kwargs["purge_step"] = step

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        """Log them once; TensorBoard keeps them as metrics of step 0."""
        if self._kwargs.get("purge_step") is None:
            super().log_hyperparams(*args, **options)

    @rank_zero_only
    def save(self) -> None:
        """Write what waits; `hparams.yaml` once and for all, so not before there are any."""
        if self.hparams or self._kwargs.get("purge_step") is not None:
            super().save()


class WandbLogger(loggers.WandbLogger):
    """Lightning's; no step is logged twice, no network is needed, and checkpoints can be artifacts.

    A continued run logs only what W&B does not have yet: what came after the checkpoint may be there already, and the
    last seconds before a kill may be missing, which `metrics.csv` still has. Where W&B cannot be reached, the run is
    kept in its folder, for `wandb sync`. With `log_model` the best and the last checkpoint are versions of an artifact
    with the aliases `best` and `latest`: "all" sends each that is saved, True those at the end.
    """

    _folder = Path()
    _first: int | None = None  # step that a continued run goes on from
    _newest = -1  # the last step that W&B has of an earlier process

    def go_on(self, folder: Path, step: int) -> None:
        """Go on where a checkpoint is; see `go_on` below."""
        self._folder, self._first = folder, step
        self._values: dict[str, Any] = {}  # what W&B has of its last step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """W&B's run; begins it first, offline if W&B cannot be reached or knows no account here."""
        import wandb

        if self._experiment is None:
            options: Any = self._wandb_init  # a parser gives None for all that nobody asked for
            limits: Any = {name: value for name, value in LIMITS.items() if f"WANDB_{name.upper()}" not in os.environ}
            options["settings"] = options.get("settings") or wandb.Settings(**limits)
            if not (options.get("resume_from") or options.get("fork_from")):
                options["resume"] = options.get("resume") or "allow"
            if self._offline:
                options["mode"] = "offline"
            try:
                self._experiment = wandb.init(**self._wandb_init)
            except wandb.errors.Error as error:
                reason = str(error).partition("\n")[0]
                warnings.warn(
                    f"W&B cannot be used ({reason}): training goes on, and the run is kept in {self.save_dir}/wandb, "
                    "from where `wandb sync` sends it",
                    stacklevel=2,
                )
                wandb.teardown()  # which still holds the run that could not begin
                options["mode"] = "offline"
                self._experiment = wandb.init(**self._wandb_init)
            self._experiment.define_metric(STEP)
            self._experiment.define_metric("*", step_metric=STEP, step_sync=True)
            if self._first is not None:
                self._catch_up(self._experiment, self._first)
        return self._experiment

    def _catch_up(self, run: Any, first: int) -> None:
        """Find out what W&B has of this run, and log what it misses."""
        rows = list(history(Path(self.save_dir or "."), run.id))
        if run.resumed:  # W&B itself knows; tables of its summary may be of any step
            rows = [{name: value for name, value in dict(run.summary).items() if isinstance(value, int | float)}]
        elif rows:
            run.log({}, step=1 + max(int(row["_step"]) for row in rows), commit=False)  # count on
        self._newest = max((row.get(STEP, -1) for row in rows), default=-1)
        for row in rows:
            self._values |= row if row.get(STEP) == self._newest else {}
        path = self._folder / "metrics.csv"
        if path.exists():
            with open(path, newline="") as file:
                for line in csv.DictReader(file):
                    values = {name: float(text) for name, text in line.items() if text and name != "step"}
                    if (step := int(line["step"])) < first:
                        self.log_metrics(values, step)

    def _has(self, row: Mapping[str, Any], step: int | None) -> bool:
        """Whether W&B has a row already; a continued run repeats every bit of all that no clock decides."""
        if step is None or step != self._newest:
            return step is not None and step < self._newest
        names = self._values.keys() & row.keys() - {"epoch"}
        return any(self._values[name] == row[name] or not isinstance(row[name], float) for name in names)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row that W&B does not have yet."""
        if self.experiment and not self._has(metrics, step):
            super().log_metrics(metrics, step)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Remember it, to be sent."""
        if self._log_model:
            self._checkpoint_callbacks[id(checkpoint_callback)] = checkpoint_callback  # type: ignore[assignment]

    @rank_zero_only
    def save(self) -> None:
        """Send what was saved since, where every checkpoint is wanted; Lightning calls this after each row."""
        if self._log_model == "all":
            self._send()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send what was saved since."""
        if status == "success":
            self._send()

    def _send(self) -> None:
        """Make new checkpoints versions of the artifact; W&B calls `latest` what came last, so the best goes first."""
        import wandb

        callbacks: list[Any] = list(self._checkpoint_callbacks.values())
        found = [("best", c.best_model_path, c.best_model_score) for c in callbacks if c.monitor]
        found += [("latest", c.last_model_path, None) for c in callbacks]
        again = False
        for alias, path, score in found:
            if not path or not os.path.isfile(path):
                continue
            if (time := os.stat(path).st_mtime) == self._logged_model_time.get(path) and not again:
                continue
            about = {"file": os.path.basename(path)} | ({} if score is None else {"score": float(score)})
            artifact = wandb.Artifact(self._checkpoint_name or f"model-{self.version}", "model", metadata=about)
            artifact.add_file(path, name="model.ckpt", policy=self.add_file_policy)
            self.experiment.log_artifact(artifact, aliases=[alias])
            self._logged_model_time[path], again = time, True


CONTINUED = (TensorBoardLogger, WandbLogger)
OUR_LOGGERS = {kind.__name__: f"{__name__}.{kind.__name__}" for kind in CONTINUED}


def go_on(chosen: Iterable[Logger], folder: Path, step: int) -> None:
    """Let the loggers of a continued run go on where its checkpoint is.

    Args:
        chosen: loggers; nothing happens to those of other kinds.
        folder: run folder.
        step: optimizer steps that the checkpoint has seen; what was logged for this step and later comes again.
    """
    for logger in chosen:
        if isinstance(logger, CONTINUED):
            logger.go_on(folder, step)


def history(folder: Path, identity: str) -> Iterator[dict[str, Any]]:
    """The rows of a run in the .wandb files below a folder, in order: values by name."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    for path in sorted(folder.glob(f"wandb/*run-*-{identity}/run-{identity}.wandb")):
        for entry in entries(path.read_bytes()):
            items = protocol.Record.FromString(entry).history.item
            if items:
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def entries(data: bytes) -> Iterator[bytes]:
    """The entries of a .wandb file: LevelDB's log format, blocks of 32 KiB; one cut short by a kill is left out."""
    place, entry = 7, b""  # after W&B's own header
    while place + HEADER.size <= len(data):
        if BLOCK - place % BLOCK < HEADER.size:  # too short for another part: the rest of the block is empty
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, place)
        place += HEADER.size
        if kind == 0 or place + length > len(data):
            return
        entry += data[place : place + length]
        place += length
        if kind in (WHOLE, LAST):
            yield entry
            entry = b""
