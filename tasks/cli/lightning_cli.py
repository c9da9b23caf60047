"""The commands that need a Trainer (fit, validate, test, predict), as a LightningCLI that builds one of them."""

import os
import time
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import restricted_number_type
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from tasks.checkpoints.contents import check_primitives
from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.checkpoints.resume import farewell, read_run
from tasks.checkpoints.writing import AtomicCheckpointIO
from tasks.cli.app import App, load, program
from tasks.cli.config_files import Options, read_config
from tasks.cli.parsing import (
    PlainErrors,
    expand,
    flat,
    given,
    merged,
    names_data,
    one_line,
    refuse_values,
    typed_options,
)
from tasks.cli.signals import SIGNALS, Stopped
from tasks.distributed.launch import (
    SameStart,
    as_one,
    as_started,
    continued,
    environment,
    settle,
    strategy,
)
from tasks.errors import RunError, UsageError, nearest, refusals
from tasks.tracking.loggers import go_on
from tasks.tracking.media import Gallery
from tasks.tracking.progress import progress_bar
from tasks.tracking.record import RunRecord
from tasks.tracking.report import closing_table, left_out, show_texts
from tasks.tracking.run_folder import (
    Continued,
    MetricsCSV,
    check_writable,
    kept_if_started,
    read_rows,
    run_folder,
)
from tasks.training.interruption import Interruption
from tasks.training.loops import with_own_loops
from tasks.training.trainer_options import (
    HIDDEN,
    FolderCheckpoint,
    as_list,
    best_checkpoint,
    fill_in,
    place_loggers,
    refuse_ours,
)

PLACES = {
    "fit": "runs/TASK/TIME",
    "predict": "the current folder",
    "validate": "nothing",
    "test": "nothing",
}
SEED = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
THIS_CALL = {
    "config",
    "help",
    "print_config",
    "run_dir",
    "debug",
    "ckpt_path",
    "resume",
    "compile",
    "text",
}
DATA = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}


class Parser(PlainErrors, LightningArgumentParser):
    """Lightning's parser with one-sentence errors."""


class TaskCLI(LightningCLI):
    """One command of one task, from its command line to its end.

    Args:
        app: the task.
        command: "fit", "validate", "test" or "predict".
        arguments: command line after the command.
    """

    def __init__(self, app: App, command: str, arguments: list[str]) -> None:
        self.app, self.command, self.started = app, command, time.perf_counter()
        self.checkpoint: dict[str, Any] | None = None
        self.last: Path | None = None
        self.damaged: Path | None = None  # a last checkpoint that another is used for
        self.base: Options = {}
        arguments = self.prepare(arguments)
        super().__init__(
            load(app.task),
            load(app.data),
            save_config_callback=None,
            trainer_defaults=dict(app.trainer),
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={
                "prog": program(app),
                command: {
                    "usage": f"{program(app)} {command} [options]",
                    "description": f"{app.commands[command].capitalize()}. What is typed wins over configs, presets, "
                    f"pretrained weights and checkpoints. `fit` without data starts from {app.default_config}.",
                },
            },
            args=[command, *arguments],
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # The command line -----------------------------------------------------------------------------------------------

    def prepare(self, arguments: list[str]) -> list[str]:
        """Put what `--resume` or `--ckpt_path`, configs, presets and pretrained weights stand for below the rest."""
        if {"-h", "--help"} & set(arguments):
            return arguments
        refuse_values(arguments, pipes=False)
        name = "--resume" if self.command == "fit" else "--ckpt_path"
        self.source, arguments = given(continued(self.app.name, self.command, arguments), name)
        self.typed, self.in_configs = typed_options(arguments), set[str]()
        if self.command == "fit" and self.source:
            self.base, self.damaged, self.last, self.checkpoint = read_run(
                Path(self.source), self.app
            )
        elif self.command != "fit":
            self.base = self.from_checkpoint()
        elif self.app.default_config and not names_data(arguments):
            arguments = ["--config", self.app.default_config, *arguments]
        origin = one_line(
            f"{self.source}/config.yaml" if self.command == "fit" else str(self.source)
        )
        base = [f"--config=# {origin}\n{yaml.safe_dump(self.base)}"] if self.base else []
        macros = {
            "--config": lambda value: self.expanded(read_config(value)),
            "-c": lambda value: self.expanded(read_config(value)),
            "--preset": lambda value: self.expanded({"preset": value}),
            "--model.pretrained": lambda value: self.expanded({"model": {"pretrained": value}}),
        }
        switches = {"--compile": "--model.compile", "--data.skip_bad": "--data.skip_bad"}
        return base + expand(arguments, macros, switches)

    def expanded(self, options: Options) -> Options:
        """Options of a file with what its preset and its pretrained weights imply put below them."""
        for misplaced in THIS_CALL.intersection(options):
            raise UsageError(f"{misplaced} belongs on the command line, not in a config file")
        self.in_configs |= {f"--{name}" for name in flat(options)}
        implied: Options = {}
        if name := options.get("preset"):
            if name not in (presets := load(self.app.presets)() if self.app.presets else {}):
                raise UsageError(nearest(name, presets, "preset"))
            implied = {"model": {"net": presets[name]}}
        pretrained = options.get("model", {}).get("pretrained")
        if pretrained and self.source:
            raise UsageError(
                "--model.pretrained cannot go with --resume: the checkpoint has the weights"
            )
        if pretrained and self.app.pretrained:
            implied = merged(implied, load(self.app.pretrained)(pretrained))
        return merged(implied, {key: value for key, value in options.items() if key != "preset"})

    def from_checkpoint(self) -> Options:
        """The model and data options kept in the checkpoint."""
        if not self.source:
            raise UsageError(
                f"{self.command} needs --ckpt_path, such as --ckpt_path "
                f"runs/{self.app.name}/latest/checkpoints/best.ckpt"
            )
        self.checkpoint = read_checkpoint(self.source, self.app.name)
        config = self.checkpoint[KEY]["config"]
        return merged(
            config, {"model": {"pretrained": None}} if "pretrained" in config["model"] else {}
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the command that was asked for, so that only its parser is built."""
        return {self.command: DATA | HIDDEN[self.command]}

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options beside those of trainer, model and data."""
        add = parser.add_argument
        seed = "Seed of all random draws: initial weights, order, augmentation, dropout."
        add("--seed_everything", type=SEED, default=self.seed_everything_default, help=seed)
        add(
            "--run_dir",
            type=str | None,
            help=f"Folder for all that the command writes; null: {PLACES[self.command]}.",
        )
        add("--debug", action="store_true", help="Show the whole traceback of an error.")
        if self.command != "fit":
            held = "Checkpoint that `fit` wrote; it holds all that is needed. Required."
            add("--ckpt_path", type=str | None, help=held)
            if self.command == "predict" and self.app.takes_text:
                add(
                    "--text",
                    type=str | None,
                    help="One text to label; the answer is printed, nothing is written.",
                )
            return
        add("--resume", type=str | None, help="Run folder to continue; options beside it win.")
        if self.app.presets:
            add(
                "--preset",
                type=str | None,
                help=f"Size of the network: {', '.join(load(self.app.presets)())}.",
            )
        add(
            "--compile",
            action="store_true",
            help="Compile the network with torch.compile, in place.",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Checkpoints, and what model and data share."""
        for source, target in self.app.links.items():
            parser.link_arguments(source, target)
        parser.link_arguments("seed_everything", "data.loading.seed")
        if self.command == "fit":
            parser.add_lightning_class_args(FolderCheckpoint, "checkpoint")
            parser.set_defaults(
                {
                    "checkpoint.save_last": True,
                    "checkpoint.save_top_k": 0,
                    "checkpoint.enable_version_counter": False,
                }
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; what is wrong is raised as `UsageError`."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Nothing: a checkpoint's options were put below the typed ones, not over them."""

    def dumped(self) -> Options:
        """The command's options as primitives, without those that belong to this call alone."""
        text = self.parser.dump(self.config, skip_link_targets=True, skip_none=False, format="yaml")
        options = yaml.safe_load(text)[self.command]
        options = {
            name: value for name, value in options.items() if name not in THIS_CALL | {"preset"}
        }
        with refusals():  # as a checkpoint would be
            for name, value in options.items():
                check_primitives(value, f"--{name}")
        return options

    # What the command builds ----------------------------------------------------------------------------------------

    def instantiate_classes(self) -> None:
        """Build data, model and Trainer."""
        with refusals():
            super().instantiate_classes()
        self.refuse_unused()

    def refuse_unused(self) -> None:
        """Refuse options that the chosen source of the data does not use, but for those that a checkpoint has."""
        kept = flat(self.base)
        for name, value in self.datamodule.unused_options().items():
            if kept.get(f"data.{name}") != value:
                source = self.config[self.command].data.source
                raise UsageError(
                    f"--data.{name} {value} means nothing to the source {source}: leave it out"
                )

    def before_instantiate_classes(self) -> None:
        """Choose the run folder; find what a resumed run does differently."""
        options = self.config[self.command]
        refuse_ours(options.trainer, self.command)
        if not self.source:
            load(self.app.task).check_options(
                options, self.typed, self.in_configs.union(self.typed)
            )
        settle(options.trainer, self.command)
        fill_in(options.trainer, self.app.epochs)
        self.folder = Path(options.run_dir or "")
        if self.command != "fit":
            if options.run_dir:
                check_writable(self.folder)
            return
        if self.source and options.run_dir:
            raise UsageError(
                "--run_dir cannot go with --resume: a run is continued in its own folder"
            )
        self.folder = (
            Path(self.source).resolve()
            if self.source
            else run_folder(self.app.name, options.run_dir)
        )
        self.options = self.dumped()  # before what belongs to this folder only, such as W&B's id
        place_loggers(as_list(options.trainer.logger), self.folder)
        now, then = flat(self.options), flat(self.base)
        both = [name for name in then if name in now]
        self.changes = [
            f"{name} {then[name]} -> {now[name]}" for name in both if now[name] != then[name]
        ]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A Trainer with this command's callbacks and loggers only."""
        options = self._get(self.config_init, "trainer")
        kwargs |= {"use_distributed_sampler": False, "logger": False, "enable_checkpointing": False}
        kwargs |= {
            "strategy": strategy(options.strategy),
            "plugins": [*as_list(options.plugins), *environment()],
        }
        if self.command == "predict":
            kwargs["devices"] = 1
        callbacks: list[Callback] = progress_bar(options.enable_progress_bar)
        kwargs["enable_progress_bar"] = any(hasattr(bar, "enable") for bar in callbacks)
        if options.enable_model_summary is None:
            kwargs["enable_model_summary"] = False
        if self.command == "fit":
            callbacks += self.fit_callbacks()
            kwargs |= {"enable_checkpointing": True, "logger": self.loggers(options.logger)}
            kwargs["plugins"] = [*kwargs["plugins"], AtomicCheckpointIO(self.damaged)]
            kwargs["default_root_dir"] = str(self.folder)
        return with_own_loops(self._instantiate_trainer({**options, **kwargs}, callbacks))

    def fit_callbacks(self) -> list[Callback]:
        """Best and last checkpoint, and the record of the run."""
        folder = str(self.folder / "checkpoints")
        self.best = best_checkpoint(folder, self.model)
        last = self._get(self.config_init, "checkpoint")
        last.dirpath = last.dirpath or folder
        self.record = RunRecord(self.folder, self.options, self.changes)
        self.start = SameStart(self.last, self.checkpoint)
        return [self.start, self.best, last, Gallery(), self.record, Interruption(last)]

    def loggers(self, chosen: Any) -> list[Any]:
        """CSV always, then those asked for, writing into the run folder."""
        extra = [logger for logger in as_list(chosen) if not isinstance(logger, bool)]
        continued = Continued(self.checkpoint) if self.source else None
        if continued:
            read_rows(self.folder / "metrics.csv")  # if it is damaged, say so now
            go_on(extra, self.folder, continued)
        return [MetricsCSV(self.folder, continued), *extra]

    # The commands ---------------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        with SIGNALS.raising(), as_one(self.trainer):
            super()._run_subcommand(subcommand)

    def restore(self, model: Any, datamodule: Any) -> None:
        """Hand over the checkpoint, if there is one, and let go of it."""
        if self.checkpoint:
            model.restore(self.checkpoint)
            datamodule.set_metadata(model.metadata)
        self.checkpoint = None

    def fit(self, model: Any, datamodule: Any, **_: Any) -> None:
        """Train, test the best checkpoint unless no test batches are wanted, and say where everything is."""
        os.environ["TESSERA_RUN_DIR"] = str(
            self.folder
        )  # for the processes that Lightning launches
        self.restore(model, datamodule)
        try:
            with kept_if_started(self.folder):
                self.trainer.fit(
                    model, datamodule=datamodule, ckpt_path=self.last, weights_only=True
                )
            outcome = self.outcome(model, datamodule)
        except Stopped as stop:
            raise farewell(stop, self.trainer, self.folder, self.app) from None
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            if self.start.restored or isinstance(error, UsageError):
                raise
            reason = (
                str(error).rstrip(".") if type(error) is ValueError else f"it is damaged, {error!r}"
            )
            raise RunError(f"checkpoint '{self.last}' cannot be used: {reason}") from error
        metrics = {**outcome, **model.notes(), **left_out(datamodule)}
        recorded = not self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if self.trainer.is_global_zero:
            seconds = time.perf_counter() - self.started
            show_texts(
                self.record.finish(self.trainer, model, metrics, seconds) if recorded else {}
            )
            follow = [as_started(f"{program(self.app)} {line}") for line in self.app.follow]
            closing_table(metrics, self.folder if recorded else None, follow)

    def outcome(self, model: Any, datamodule: Any) -> dict[str, float]:
        """Metrics of the test; where no test batches are wanted, the data stay unread: those of the last validation."""
        if self.trainer.limit_test_batches == 0:
            found = self.trainer.callback_metrics
            return {name: float(value) for name, value in found.items() if name.startswith("val/")}
        best = (
            self.best.best_model_path or None
        )  # None: stopped before a validation, so the last weights are tested
        tested = self.trainer.test(
            model, datamodule, ckpt_path=best, verbose=False, weights_only=True
        )
        return dict(tested[0]) if tested else {}

    def _evaluate(self, model: Any, datamodule: Any) -> None:
        self.restore(model, datamodule)
        found = getattr(self.trainer, self.command)(model, datamodule=datamodule, verbose=False)
        if self.trainer.is_global_zero:
            closing_table({**(found[0] if found else {}), **model.notes(), **left_out(datamodule)})

    def validate(self, model: Any, datamodule: Any, **_: Any) -> None:
        """Evaluate on the validation split."""
        self._evaluate(model, datamodule)

    def test(self, model: Any, datamodule: Any, **_: Any) -> None:
        """Evaluate on the test split."""
        self._evaluate(model, datamodule)

    def predict(self, model: Any, datamodule: Any, **_: Any) -> None:
        """Label files and write `predictions.csv`."""
        self.restore(model, datamodule)
        if self.app.takes_text:
            datamodule.predict_text = self.config[self.command].text
        model.write_predictions(self.trainer, datamodule, self.folder)
