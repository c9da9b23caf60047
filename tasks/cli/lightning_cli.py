"""The commands that need a Trainer (fit, validate, test, predict), as a LightningCLI that builds
one of them.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import restricted_number_type
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from tasks.checkpoints.contents import check_primitives
from tasks.checkpoints.resume import stop_message
from tasks.checkpoints.writing import AtomicCheckpointIO
from tasks.cli.app import App, load, program
from tasks.cli.command_line import COMMAND_LINE_ONLY, CommandLine
from tasks.cli.config_files import Options
from tasks.cli.parsing import OneLineErrorParser, flat
from tasks.cli.signals import Stopped
from tasks.distributed.environment import with_launcher
from tasks.distributed.launch import (
    SameCheckpoint,
    end_workers,
    fail_together,
    resolve_devices,
    slurm_plugins,
    strategy,
)
from tasks.errors import RunError, UsageError, usage_errors
from tasks.lightning_patches import RunCheckpoint, use_exact_loops
from tasks.tracking.media import MediaLogger
from tasks.tracking.metrics_csv import LoggedRows, MetricsCSV, read_rows
from tasks.tracking.progress import progress_bar
from tasks.tracking.record import RunRecord
from tasks.tracking.report import print_results, print_texts, skipped_samples
from tasks.tracking.run_folder import check_writable, remove_unless_started, run_folder
from tasks.training.interruption import Interruption
from tasks.training.trainer_options import (
    as_list,
    best_checkpoint,
    check_trainer_options,
    place_loggers,
    set_defaults,
)

OUTPUT = {
    "fit": "runs/TASK/TIME",
    "predict": "the current folder",
    "validate": "nothing",
    "test": "nothing",
}
SEED = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])


class Parser(OneLineErrorParser, LightningArgumentParser):
    """Lightning's parser with one-sentence errors."""


class TaskCLI(LightningCLI):
    """Options, data, model and Trainer of one command of one task; the method of the command's name
    runs it.

    Args:
        app: the task.
        command: "fit", "validate", "test" or "predict".
        arguments: command line after the command.
    """

    def __init__(self, app: App, command: str, arguments: list[str]) -> None:
        self.app = app
        self.command = command
        self.start_time = time.perf_counter()
        self.line = CommandLine(app, command, arguments)
        super().__init__(
            load(app.task),
            load(app.data),
            save_config_callback=None,
            trainer_defaults=dict(app.trainer),
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={
                "prog": program(app),
                "usage": f"{program(app)} {command} [options]",
                "description": f"{app.commands[command].capitalize()}. What is typed wins over "
                f"configs, presets, "
                f"pretrained weights and checkpoints. `fit` without data starts from "
                f"{app.default_config}.",
            },
            args=self.line.arguments,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # The command line -----------------------------------------------------------------------------

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options beside those of trainer, model and data."""
        add = parser.add_argument
        seed = "Seed of all random numbers: initial weights, order, augmentation, dropout."
        add("--seed_everything", type=SEED, default=self.seed_everything_default, help=seed)
        run_dir = f"Folder for all that the command writes; null: {OUTPUT[self.command]}."
        add("--run_dir", type=str | None, help=run_dir)
        add("--debug", action="store_true", help="Show the whole traceback of an error.")
        if self.command == "fit":
            resume = "Run folder to continue; options beside it win."
            add("--resume", type=str | None, help=resume)
            if self.app.presets:
                presets = ", ".join(load(self.app.presets)())
                add("--preset", type=str | None, help=f"Size of the network: {presets}.")
            compile = "Compile the network with torch.compile, in place."
            add("--compile", action="store_true", help=compile)
        else:
            ckpt_path = "Checkpoint that `fit` wrote; it holds all that is needed. Required."
            add("--ckpt_path", type=str | None, help=ckpt_path)
        if self.command == "predict" and self.app.takes_text:
            text = "One text to label; the answer is printed, nothing is written."
            add("--text", type=str | None, help=text)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Checkpoints, and what model and data share."""
        for source, target in self.app.links.items():
            parser.link_arguments(source, target)
        parser.link_arguments("seed_everything", "data.loading.seed")
        if self.command == "fit":
            parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
            parser.set_defaults(
                {
                    "checkpoint.save_last": True,
                    "checkpoint.save_top_k": 0,
                    "checkpoint.enable_version_counter": False,
                }
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse without Lightning's warning about `args` in a process that has a command line."""
        self.config = parser.parse_args(args)

    def options_to_save(self) -> Options:
        """The command's options as primitives, without those that belong to this call alone."""
        text = self.parser.dump(self.config, skip_link_targets=True, skip_none=False, format="yaml")
        left_out = COMMAND_LINE_ONLY | {"preset"}
        options = {
            name: value for name, value in yaml.safe_load(text).items() if name not in left_out
        }
        with usage_errors():  # a checkpoint holds them, too
            for name, value in options.items():
                check_primitives(value, f"--{name}")
        return options

    # What the command builds ----------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Check the options, choose the run folder, find what a resumed run does differently."""
        check_trainer_options(self.config.trainer, self.command)
        if not self.line.source:
            load(self.app.task).check_options(self.config, self.line.typed, self.line.named)
        resolve_devices(self.config.trainer, self.command)
        set_defaults(self.config.trainer, self.app.epochs)
        self.folder = Path(self.config.run_dir or "")
        if self.command != "fit":
            if self.config.run_dir:
                check_writable(self.folder)
            return
        if self.line.source and self.config.run_dir:
            raise UsageError(
                "--run_dir cannot go with --resume: a run is continued in its own folder"
            )
        if self.line.source:
            self.folder = Path(self.line.source).resolve()
        else:
            self.folder = run_folder(self.app.name, self.config.run_dir)
        self.options = (
            self.options_to_save()
        )  # before what belongs to this folder only, such as W&B's id
        self.logged = LoggedRows(self.line.checkpoint)
        place_loggers(as_list(self.config.trainer.logger), self.folder, self.logged)
        now = flat(self.options)
        self.changes = [
            f"{name} {value} -> {now[name]}"
            for name, value in flat(self.line.saved_options).items()
            if name in now and now[name] != value
        ]

    def instantiate_classes(self) -> None:
        """Build data, model and Trainer; refuse data options that the source does not use."""
        with usage_errors():
            super().instantiate_classes()
        saved = flat(self.line.saved_options)
        for name, value in self.datamodule.unused_options().items():
            if saved.get(f"data.{name}") != value:
                source = self.config.data.source
                raise UsageError(
                    f"--data.{name} {value} means nothing to the source {source}: leave it out"
                )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A Trainer with this command's callbacks and loggers only."""
        options = self.config_init.trainer
        callbacks: list[Callback] = [
            *as_list(options.callbacks),
            *progress_bar(options.enable_progress_bar),
        ]
        plugins = [*as_list(options.plugins), *slurm_plugins()]
        kwargs |= {
            "use_distributed_sampler": False,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": bool(options.enable_model_summary),
            "enable_progress_bar": any(isinstance(one, ProgressBar) for one in callbacks),
            "strategy": strategy(options.strategy),
        }
        if self.command == "predict":
            kwargs["devices"] = 1
        if self.command == "fit":
            callbacks += self.fit_callbacks()
            plugins.append(AtomicCheckpointIO(self.line.damaged))
            kwargs["enable_checkpointing"] = True
            kwargs["logger"] = self.loggers(options.logger)
            kwargs["default_root_dir"] = str(self.folder)
        return use_exact_loops(
            super().instantiate_trainer(callbacks=callbacks, plugins=plugins, **kwargs)
        )

    def fit_callbacks(self) -> list[Callback]:
        """Best and last checkpoint, and the record of the run; Lightning adds that of the option
        `checkpoint`.
        """
        folder = str(self.folder / "checkpoints")
        last: RunCheckpoint = self.config_init.checkpoint
        last.dirpath = last.dirpath or folder
        self.best = best_checkpoint(folder, self.model)
        self.record = RunRecord(self.folder, self.options, self.changes)
        self.same_checkpoint = SameCheckpoint(self.line.resume_path, self.line.checkpoint)
        return [self.same_checkpoint, self.best, MediaLogger(), self.record, Interruption(last)]

    def loggers(self, chosen: Any) -> list[Any]:
        """CSV always, then those asked for, writing into the run folder."""
        if self.line.source:
            read_rows(self.folder / "metrics.csv")  # if it is damaged, say so now
        others = [logger for logger in as_list(chosen) if not isinstance(logger, bool)]
        return [MetricsCSV(self.folder, self.logged), *others]

    # The commands ---------------------------------------------------------------------------------

    def restore(self) -> None:
        """Hand over the checkpoint, if there is one, and let go of it."""
        if self.line.checkpoint:
            self.model.restore(self.line.checkpoint)
            self.datamodule.set_metadata(self.model.metadata)
        self.line.checkpoint = None

    def fit(self) -> None:
        """Train, test the best checkpoint unless no test batches are wanted, and say where
        everything is.
        """
        # for the processes that Lightning launches
        os.environ["TESSERA_RUN_DIR"] = str(self.folder)
        self.restore()
        with fail_together(self.trainer):
            try:
                with self.checkpoint_errors(), remove_unless_started(self.folder):
                    self.trainer.fit(
                        self.model,
                        datamodule=self.datamodule,
                        ckpt_path=self.line.resume_path,
                        weights_only=True,
                    )
                metrics = self.final_metrics()
            except Stopped as stop:
                end_workers(self.trainer)
                message = stop_message(stop, self.trainer, self.folder, self.app)
                raise Stopped(stop.number, message) from None
            self.finish(metrics)

    @contextmanager
    def checkpoint_errors(self) -> Iterator[None]:
        """An error before training starts is about the checkpoint that is restored.

        Raises:
            RunError: names the checkpoint.
        """
        try:
            yield
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            if self.same_checkpoint.restored or isinstance(error, UsageError):
                raise
            reason = f"it is damaged, {error!r}"
            if type(error) is ValueError:
                reason = str(error).rstrip(".")
            raise RunError(
                f"checkpoint '{self.line.resume_path}' cannot be used: {reason}"
            ) from error

    def final_metrics(self) -> dict[str, Any]:
        """Metrics of the test; without test batches, for which the data stay unread, those of the
        last validation.
        """
        if self.trainer.limit_test_batches == 0:
            logged = self.trainer.callback_metrics
            return {name: float(value) for name, value in logged.items() if name.startswith("val/")}
        tested = self.trainer.test(
            self.model,
            self.datamodule,
            ckpt_path=self.best.best_model_path or None,  # without a validation: the last weights
            verbose=False,
            weights_only=True,
        )
        return dict(tested[0]) if tested else {}

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write the summary, and print the results and what to do next."""
        if not self.trainer.is_global_zero:
            return
        metrics = {**metrics, **self.model.notes(), **skipped_samples(self.datamodule)}
        folder = None
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = self.folder
            seconds = time.perf_counter() - self.start_time
            print_texts(self.record.finish(self.trainer, self.model, metrics, seconds))
        commands = [with_launcher(f"{program(self.app)} {line}") for line in self.app.follow]
        print_results(metrics, folder, commands)

    def validate(self) -> None:
        """Evaluate on the validation split."""
        self.evaluate(self.trainer.validate)

    def test(self) -> None:
        """Evaluate on the test split."""
        self.evaluate(self.trainer.test)

    def evaluate(self, run: Callable[..., list[Any]]) -> None:
        """Evaluate with a method of the Trainer, and print the results."""
        self.restore()
        with fail_together(self.trainer):
            metrics = run(self.model, datamodule=self.datamodule, verbose=False)
            if self.trainer.is_global_zero:
                notes = {**self.model.notes(), **skipped_samples(self.datamodule)}
                print_results({**(metrics[0] if metrics else {}), **notes})

    def predict(self) -> None:
        """Label files and write `predictions.csv`."""
        self.restore()
        if self.app.takes_text:
            self.datamodule.predict_text = self.config.text
        self.model.write_predictions(self.trainer, self.datamodule, self.folder)
