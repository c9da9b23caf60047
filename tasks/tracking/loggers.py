"""Lightning's W&B and TensorBoard loggers, in runs that are continued, lose the network, or keep their checkpoints."""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import _DummyExperiment
from pytorch_lightning import loggers
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from datamodules.utils.files import open_regular, replacing
from tasks.tracking.run_folder import Continued, read_rows
from tasks.tracking.wandb_files import history

STEP = "trainer/global_step"  # Lightning's name of W&B's x axis
LIMITS = {"init_timeout": 30.0, "finish_timeout": 30.0}  # seconds that W&B may keep a run waiting
PATIENCE, UPLOAD = 10.0, 300.0  # seconds for an answer, and for the last checkpoints to be sent


def in_background(call: Callable[[], Any]) -> "Future[Any]":
    """The result to come of a call in a thread of its own, which keeps no process from ending."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def reason(error: BaseException) -> str:
    """An error's first line; one without words is that of waiting in vain."""
    return str(error).partition("\n")[0] or "no answer"


class TensorBoardLogger(loggers.TensorBoardLogger):
    """Lightning's; a continued run takes out of the files what it logs again, since not all readers can tell."""

    _folder = Path()
    _continued: Continued | None = None

    def go_on(self, folder: Path, continued: Continued) -> None:
        """Go on where a checkpoint is; see `go_on` below."""
        self._folder, self._continued = folder, continued

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """TensorBoard's writer."""
        if self._experiment is None and self._continued:
            keep_events(Path(self.log_dir), self._folder, self._continued)
        return super().experiment

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        """Log them once; TensorBoard keeps them as metrics of step 0."""
        if self._continued is None or self._continued.latest < 0:
            super().log_hyperparams(*args, **options)

    @rank_zero_only
    def save(self) -> None:
        """Write what waits; `hparams.yaml` once and for all, so not before there are any."""
        file = Path(self.log_dir, self.NAME_HPARAMS_FILE)
        if (
            not file.is_file()
        ):  # where a link or a pipe has its name, Lightning would write into that
            file.unlink(missing_ok=True)
        if self.hparams or self._continued:
            super().save()


class WandbLogger(loggers.WandbLogger):
    """Lightning's; no step is logged twice, no network is needed, and checkpoints can be artifacts.

    A continued run logs only what W&B does not have yet: what came after the checkpoint may be there already, and the
    last seconds before a kill may be missing, which `metrics.csv` still has. Where W&B cannot be reached, the run is
    kept in its folder, for `wandb sync`; W&B's own process does that too where the connection is lost on the way, and
    where that process is lost, training goes on without it. With `log_model` the best and the last checkpoint are
    versions of an artifact with the aliases `best` and `latest`: "all" sends each that is saved, True those at the end.
    """

    _folder = Path()
    _continued: Continued | None = None
    _newest = -1  # the last step that W&B has of an earlier process
    _lost = _silent = False  # W&B's process, and its server
    _asked: "Future[Any] | None" = None  # of the server

    def go_on(self, folder: Path, continued: Continued) -> None:
        """Go on where a checkpoint is; see `go_on` below."""
        self._folder, self._continued = folder, continued
        self._values: dict[str, Any] = {}  # what W&B has of its last step
        self._unsure = set[str]()  # which of them may be of an earlier step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """W&B's run, once it is lost one that does nothing; begins it first, offline if there is no way to W&B."""
        if self._lost:
            return _DummyExperiment()
        if self._experiment is None:
            self._experiment = self._begun()
            self._experiment.define_metric(STEP)
            self._experiment.define_metric("*", step_metric=STEP, step_sync=True)
            if self._continued:
                self._catch_up(self._experiment, self._continued)
        return self._experiment

    def _begun(self) -> Any:
        """W&B's run, offline if W&B cannot be reached or knows no account here."""
        import wandb

        options: Any = self._wandb_init  # a parser gives None for all that nobody asked for
        limits: Any = {
            name: value
            for name, value in LIMITS.items()
            if f"WANDB_{name.upper()}" not in os.environ
        }
        options["settings"] = options.get("settings") or wandb.Settings(**limits)
        options.pop("anonymous", None)  # W&B has no such thing any more, and warns
        Path(self.save_dir or ".").mkdir(parents=True, exist_ok=True)  # W&B asks git about it
        if not (options.get("resume_from") or options.get("fork_from")):
            options["resume"] = options.get("resume") or "allow"
        if self._offline:
            options["mode"] = "offline"
        try:
            return wandb.init(**self._wandb_init)
        except wandb.errors.Error as error:
            self._warn(f"W&B cannot be used ({reason(error)})", "the run is kept")
            wandb.teardown()  # which still holds the run that could not begin
            options["mode"] = "offline"
            return wandb.init(**self._wandb_init)

    def _warn(self, what: str, kept: str) -> None:
        place = f"{self.save_dir}/wandb, from where `wandb sync` sends it"
        warnings.warn(f"{what}: training goes on, and {kept} in {place}", stacklevel=2)

    def _call(self, call: Callable[[], Any]) -> None:
        """Tell W&B's process something; where that is gone, or hangs, go on without it."""
        try:
            in_background(call).result(PATIENCE)
        except Exception as error:
            self._lose(error)

    def _ask(self, call: Callable[[], Any], wait: bool = True) -> None:
        """Do what W&B's server has to answer, one at a time; as long as it owes an answer, no more of it."""
        if self._asked and not self._asked.done() and (self._silent or not wait):
            return
        try:
            if self._asked:
                self._asked.result(PATIENCE)
            self._asked, self._silent = in_background(call), False
            if wait:
                self._asked.result(PATIENCE)
        except TimeoutError:
            if not self._silent:
                self._warn("W&B does not answer", "all but pictures and checkpoints is kept")
            self._silent = True
        except Exception as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        import wandb

        self._lost = True
        self._warn(f"W&B was lost ({reason(error)})", "what it had by then is kept")
        with suppress(Exception):
            in_background(wandb.teardown).result(
                PATIENCE
            )  # or it would wait, and complain, at the end

    def _catch_up(self, run: Any, continued: Continued) -> None:
        """Find out what W&B has of this run, and log what it misses."""
        rows, lines = (
            list(history(Path(self.save_dir or "."), run.id)),
            read_rows(self._folder / "metrics.csv"),
        )
        if run.resumed:  # W&B itself knows; tables of its summary may be of any step
            rows = [
                {
                    name: value
                    for name, value in dict(run.summary).items()
                    if isinstance(value, int | float)
                }
            ]
        elif rows:
            run.log({}, step=1 + max(int(row["_step"]) for row in rows), commit=False)  # count on
        self._newest = max((row.get(STEP, -1) for row in rows), default=-1)
        for row in rows:
            self._values |= row if row.get(STEP) == self._newest else {}
        before = {
            name: text
            for line in lines
            if int(line["step"]) < self._newest
            for name, text in line.items()
        }
        self._unsure = {
            name
            for name, text in before.items()
            if run.resumed and float(text) == self._values.get(name)
        }
        for line in lines:
            if continued.keeps(line):
                values = {name: float(text) for name, text in line.items() if name != "step"}
                self.log_metrics(values, int(line["step"]))

    def _has(self, row: Mapping[str, Any], step: int | None) -> bool:
        """Whether W&B has a row already; a continued run repeats every bit of all that no clock decides."""
        if step is None or step != self._newest:
            return step is not None and step < self._newest
        names = self._values.keys() & row.keys() - {"epoch"}
        same = {
            name
            for name in names
            if self._values[name] == row[name] or not isinstance(row[name], float)
        }
        return bool(same - self._unsure) or (bool(same) and same == names)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row that W&B does not have yet."""
        if not self.experiment or self._lost or self._has(metrics, step):
            return
        numbers = all(isinstance(value, int | float) for value in metrics.values())
        (self._call if numbers else self._ask)(partial(super().log_metrics, metrics, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log the configuration."""
        if self.experiment and not self._lost:
            self._call(partial(super().log_hyperparams, params))

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Remember it, to be sent."""
        if self._log_model:
            self._checkpoint_callbacks[id(checkpoint_callback)] = checkpoint_callback  # type: ignore[assignment]

    @rank_zero_only
    def save(self) -> None:
        """Send what was saved since, where every checkpoint is wanted; Lightning calls this after each row."""
        if self._log_model == "all":
            self._deliver()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send what was saved since, and wait for it."""
        if status == "success":
            self._deliver(wait=True)

    def _deliver(self, wait: bool = False) -> None:
        """Make new checkpoints versions of the artifact; W&B calls `latest` what came last, so the best goes first."""
        import wandb

        owed = self._asked and not self._asked.done()
        if self._lost or (owed and (self._silent or not wait)):
            return
        run, new = self.experiment, list[tuple[Any, str]]()
        callbacks: list[Any] = list(self._checkpoint_callbacks.values())
        found = [("best", c.best_model_path, c.best_model_score) for c in callbacks if c.monitor]
        found += [("latest", c.last_model_path, None) for c in callbacks]
        for alias, path, score in found:
            if not path or not os.path.exists(path):
                continue
            if (time := os.stat(path).st_mtime) == self._logged_model_time.get(path) and not new:
                continue
            about = {"file": os.path.basename(path)} | (
                {} if score is None else {"score": float(score)}
            )
            artifact = wandb.Artifact(
                self._checkpoint_name or f"model-{self.version}", "model", metadata=about
            )
            add = (
                artifact.add_dir if os.path.isdir(path) else artifact.add_file
            )  # a folder has its parts
            add(path, name="model.ckpt", policy=self.add_file_policy)
            new.append((artifact, alias))
            self._logged_model_time[path] = time
        if new:
            self._ask(lambda: [run.log_artifact(one, aliases=[alias]) for one, alias in new], wait)
        if new and wait and not (self._silent or self._lost or run.offline):
            with suppress(Exception):  # W&B says what it could not send
                in_background(lambda: [artifact.wait() for artifact, _ in new]).result(UPLOAD)


CONTINUED = (TensorBoardLogger, WandbLogger)
OUR_LOGGERS = {kind.__name__: f"{__name__}.{kind.__name__}" for kind in CONTINUED}


def go_on(chosen: Iterable[Logger], folder: Path, continued: Continued) -> None:
    """Let the loggers of a continued run go on where its checkpoint is.

    Args:
        chosen: loggers; nothing happens to those of other kinds.
        folder: run folder.
        continued: what they keep; the rest comes again.
    """
    for logger in chosen:
        if isinstance(logger, CONTINUED):
            logger.go_on(folder, continued)


def keep_events(place: Path, folder: Path, continued: Continued) -> None:
    """Leave in TensorBoard's files at `place` what the continued run in `folder` does not log again."""
    reading: Any = import_module("tensorboard.backend.event_processing.event_file_loader")
    writing: Any = import_module("tensorboard.summary.writer.record_writer")
    protocol: Any = import_module("tensorboard.compat.proto.event_pb2")
    rows = [
        row for row in read_rows(folder / "metrics.csv") if int(row["step"]) == continued.latest
    ]
    again = {name for row in rows if not continued.keeps(row) for name in row}

    def keeps(event: Any) -> bool:
        tag = event.summary.value[0].tag if event.summary.value else ""
        if not tag or event.step != continued.latest:
            return not tag or bool(event.step < continued.latest)
        return tag not in again and not (
            continued.validates and tag.startswith("val/")
        )  # pictures are in no row

    for path in sorted(place.glob("events.out.tfevents.*")):
        open_regular(path).close()  # TensorBoard would wait for a pipe
        with replacing(path) as partial, open(partial, "wb") as file:
            writer = writing.RecordWriter(file)
            for record in reading.RawEventFileLoader(str(path)).Load():
                if keeps(protocol.Event.FromString(record)):
                    writer.write(record)
