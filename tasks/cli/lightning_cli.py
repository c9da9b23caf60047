"""The commands that need a Trainer: fit, validate, test, predict."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse.typing import restricted_number_type
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.trainer.states import TrainerFn

from datamodules.base import ResumableDataModule
from datamodules.sources import choose_source
from tasks.checkpoints.exporting import check_writable
from tasks.checkpoints.resume import stop_message
from tasks.checkpoints.writing import AtomicCheckpointIO
from tasks.classification import ClassifierTask
from tasks.cli.app import App, load, program
from tasks.cli.help_screens import NO_CHECKPOINT, help_text, preset_help
from tasks.cli.invocation import COMMAND_LINE_ONLY, Invocation
from tasks.cli.parsing import OneLineErrorParser, refuse_overwriting
from tasks.cli.signals import SIGNALS, Stopped
from tasks.distributed import launch
from tasks.distributed.predicting import fingerprint, predicts_all
from tasks.errors import RunError, UsageError, usage_errors
from tasks.lightning_patches import RunCheckpoint, use_exact_loops
from tasks.options import Options, accepted_options, as_list, flat
from tasks.predictions import PredictionFile
from tasks.tracking.media import MediaLogger
from tasks.tracking.metrics_csv import LoggedRows, MetricsCSV, last_validation, read_rows
from tasks.tracking.progress import progress_callbacks
from tasks.tracking.record import EvaluatedData, RunRecord, save_evaluation
from tasks.tracking.report import (
    evaluation_notes,
    print_results,
    print_skipped,
    print_texts,
    skipped_samples,
)
from tasks.tracking.run_folder import (
    check_results_folder,
    choose_run_folder,
    make_folder,
    remove_unless_started,
)
from tasks.training import affinity, distillation, trainer_options
from tasks.training.interruption import Interruption

REPLACED = {"fit": "configs, presets and pretrained weights"}
SEED = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])


class Parser(OneLineErrorParser, LightningArgumentParser):
    """Lightning's parser with one-sentence errors."""


class TaskCLI(LightningCLI):
    """Options, data, model and Trainer of one command; the method of its name runs it."""

    def __init__(self, app: App, command: str, arguments: list[str]) -> None:
        self.app = app
        self.command = command
        self.start_time = time.perf_counter()
        data = load(app.data)
        if not issubclass(data, ResumableDataModule):
            raise UsageError(f"{app.data} must be a ResumableDataModule of datamodules/base.py")
        self.invocation = Invocation(app, command, arguments)
        super().__init__(
            self.invocation.task,
            data,
            save_config_callback=None,
            trainer_defaults={"log_every_n_steps": 10, "num_sanity_val_steps": 0, **app.trainer},
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={
                "prog": program(app.name),
                "usage": f"{program(app.name)} {command} [options]",
                "description": f"{app.commands[command].capitalize()}. Options on the command line "
                + f"replace those of {REPLACED.get(command, 'the checkpoint and of configs')}."
                + f" Without options of data it reads {app.default_config}."
                * (command == "fit" and app.default_config is not None),
            },
            args=self.invocation.arguments,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # Options --------------------------------------------------------------------------------------

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add = parser.add_argument
        if self.command == "fit":
            run_dir = "Folder for the files of the run; null: runs/TASK/TIME."
            add("--run_dir", type=str | None, help=run_dir)
            resume = "Run folder to continue, or its last.ckpt; options given replace its own."
            add("--resume", type=str | None, help=resume)
            look = "Steps between drawings of the attention in RUN_DIR/look; null: none."
            add("--look_every", type=int | None, help=look)
            if self.app.presets:
                add("--preset", type=str | None, help=preset_help(load(self.app.presets)))
            if accepted_options(self.invocation.task, compile=True):
                compile = "Compile the network with torch.compile; same as --model.compile true."
                add("--compile", action="store_true", help=compile)
        else:
            ckpt_path = "Required: checkpoint that `fit` wrote; it also holds the options."
            add("--ckpt_path", type=str | None, help=ckpt_path)
        if self.command in ("validate", "test"):
            output = "Folder for metrics, predictions and figures; null: none are written."
            add("--output", type=str | None, help=output)
        if self.command == "predict":
            needed = "Required" + " without --text" * self.app.takes_text
            add("--input", type=str | None, help=f"{needed}: {self.app.predict_input}.")
            if self.app.takes_text:
                text = "Text to predict for, may be given several times; answers are printed."
                add("--text", type=list[str], default=[], help=text)
            output = "File to write: .csv, .json, .jsonl (an object per line) or .parquet; null: "
            output += "predictions.csv, and none if the answer is printed."
            add("--output", type=str | None, help=output)
            if issubclass(self.invocation.task, ClassifierTask):
                top_k = "Write the k most likely classes; null: the probabilities of all."
                add("--top_k", type=int | None, help=top_k)
        seed = "Seed of all random numbers (initial weights, order, augmentation, dropout)."
        add("--seed_everything", type=SEED, default=self.seed_everything_default, help=seed)
        add("--debug", action="store_true", help="Show the whole traceback of an error.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of checkpoints, and link those that model and data share."""
        for source, target in self.app.links.items():
            parser.link_arguments(source, target)
        assert isinstance(parser, Parser)
        for seed in {"data.loading.seed", "data.seed"} & parser.known_options():
            parser.link_arguments("seed_everything", seed)
        if self.command == "fit":
            parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
            defaults = {"save_last": True, "save_top_k": 0, "enable_version_counter": False}
            parser.set_defaults({f"checkpoint.{name}": value for name, value in defaults.items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse without Lightning's warning that `args` are not those of the process."""
        self.config = parser.parse_args(args)
        if (topic := self.invocation.help_topic) is not None:
            trainer_options.set_defaults(self.config.trainer, self.app.epochs)
            if self.invocation.preset:
                self.config.preset = self.invocation.preset
            print(help_text(parser, self.app, self.command, self.config, topic))
            if self.command != "fit" and not self.invocation.saved_at:
                print(f"\n{NO_CHECKPOINT}")
            raise SystemExit(0)

    def options_to_save(self) -> Options:
        """The command's options as primitives, without those of the command line only."""
        text = self.parser.dump(self.config, skip_link_targets=True, skip_none=False, format="json")
        left_out = COMMAND_LINE_ONLY | {"preset"}
        saved = json.loads(text)
        return {name: value for name, value in saved.items() if name not in left_out}

    # What the command builds ----------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Check the options, choose the run folder, and list what changes in a resumed run."""
        trainer_options.check_trainer_options(self.config.trainer, self.command)
        if not self.invocation.saved_at:
            self.invocation.task.check_options(
                self.config, self.invocation.on_command_line, self.invocation.given
            )
        launch.resolve_devices(self.config.trainer)
        trainer_options.set_defaults(self.config.trainer, self.app.epochs)
        if self.command == "predict":
            if self.config.input is None and not self.app.takes_text:
                raise UsageError(f"predict needs --input: {self.app.predict_input}")
            output = self.config.output or "predictions.csv"
            refuse_overwriting({"input": self.config.input, "output": output})
            is_default = self.config.output is None
            top_k = self.config.get("top_k")
            self.file = PredictionFile(Path(output), top_k, is_default=is_default)
            if not is_default:
                check_writable(self.file.path.parent, "--output")
            return
        data = self.config.data
        if sources := load(self.app.data).sources:
            with usage_errors():  # configs and checkpoints keep the source that the path shows
                data.source = choose_source(sources, data.source, data.path, data.dataset)
        if self.command != "fit":
            if self.config.output:
                check_results_folder(Path(self.config.output))
            return
        if self.invocation.saved_at and self.config.run_dir:
            raise UsageError("--run_dir cannot go with --resume: a run resumes in its own folder")
        if self.invocation.saved_at:
            self.folder = Path(self.invocation.saved_at).resolve()
        else:
            self.folder = choose_run_folder(self.app.name, self.config.run_dir)
        trainer_options.place_checkpoints(self.config.checkpoint)
        self.options = self.options_to_save()  # before `place_loggers` adds W&B's id and the like
        self.logged_rows = LoggedRows(self.invocation.checkpoint)
        trainer_options.place_loggers(
            as_list(self.config.trainer.logger), self.folder, self.logged_rows
        )
        now = flat(self.options)
        self.changes = [
            f"{name} {value} -> {now[name]}"
            for name, value in flat(self.invocation.saved_options).items()
            if name in now and now[name] != value
        ]

    def instantiate_classes(self) -> None:
        """Build data, model and Trainer; refuse data options that the source does not use."""
        with usage_errors(), self.invocation.defaults_named(flat(self.config.as_dict())):
            super().instantiate_classes()
        if self.command == "predict":  # --input need not be of the source of the training
            return
        saved = flat(self.invocation.saved_options)
        for name, value in self.datamodule.unused_options().items():
            if saved.get(f"data.{name}") != value:
                source = self.config.data.source
                can_be_null = isinstance(value, str)
                hint = f"; if a config sets it, add --data.{name} null" if can_be_null else ""
                raise UsageError(
                    f"--data.{name} {value} is not for the source {source}: leave it out{hint}"
                )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self.config_init.trainer
        callbacks: list[Callback] = [
            *as_list(options.callbacks),
            *progress_callbacks(options.enable_progress_bar, options.max_time),
        ]
        plugins = [*as_list(options.plugins), *launch.slurm_plugins()]
        kwargs |= {
            "use_distributed_sampler": False,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": bool(options.enable_model_summary),
            "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
            "strategy": launch.strategy(options.strategy),
        }
        if self.command in ("validate", "test"):
            callbacks.append(EvaluatedData())
            if self.config.output:
                callbacks.append(MediaLogger())
        if self.command == "fit":
            callbacks += [*self.fit_callbacks(), affinity.CpuAffinity()]
            if self.config.look_every is not None:
                look = load("tasks.look.training:look_callback")  # imports much
                callbacks.append(look(self.config.look_every, self.folder, self.model.name))
            loaded = {self.invocation.resume_path: self.invocation.checkpoint}
            plugins.append(AtomicCheckpointIO(self.invocation.damaged, loaded))
            read_rows(self.folder / "metrics.csv")  # raises now if a resumed run has damaged it
            loggers = [logger for logger in as_list(options.logger) if not isinstance(logger, bool)]
            kwargs |= {"enable_checkpointing": True, "default_root_dir": str(self.folder)}
            kwargs["logger"] = [MetricsCSV(self.folder, self.logged_rows), *loggers]
        return use_exact_loops(
            super().instantiate_trainer(callbacks=callbacks, plugins=plugins, **kwargs)
        )

    def fit_callbacks(self) -> list[Callback]:
        """The callbacks of a fit; Lightning adds the one of `--checkpoint`."""
        folder = str(self.folder / "checkpoints")
        last: RunCheckpoint = self.config_init.checkpoint
        last.dirpath = last.dirpath or folder
        self.best = last.best = RunCheckpoint(
            folder,
            trainer_options.BEST_FILENAME,
            monitor=self.model.monitor,
            mode=self.model.monitor_mode,
            enable_version_counter=False,
            save_on_train_epoch_end=False,  # training may end without a validation
        )
        given = self.invocation
        self.record = RunRecord(
            self.folder, self.options, self.changes, given.command_line, given.names_length
        )
        self.same_checkpoint = launch.SameCheckpoint(given.resume_path, given.checkpoint)
        return [self.same_checkpoint, self.best, MediaLogger(), self.record, Interruption(last)]

    # The commands ---------------------------------------------------------------------------------

    def restore(self) -> None:
        """Hand the checkpoint, if there is one, to model and data.

        In `fit`, `AtomicCheckpointIO` keeps it until Lightning loads it.
        """
        self.invocation.describe_source(self.datamodule.source, self.config.data.get("path"))
        if self.invocation.checkpoint:
            self.model.restore(self.invocation.checkpoint)
            self.datamodule.set_metadata(self.model.metadata)
        self.invocation.checkpoint = None

    def fit(self) -> None:
        """Train, test the best checkpoint, and print results and paths."""
        distillation.check_path(self.config.get("model.teacher.path"))  # before data are read
        os.environ["TESSERA_RUN_DIR"] = str(self.folder)  # for processes that Lightning launches
        self.restore()
        with launch.fail_together(self.trainer):
            try:
                with self.restore_errors(), remove_unless_started(self.folder):
                    self.trainer.fit(
                        self.model,
                        datamodule=self.datamodule,
                        ckpt_path=self.invocation.resume_path,
                        weights_only=True,
                    )
                self.finish(self.final_metrics())
            except BaseException as error:  # of a signal, for which Lightning raises SystemExit
                number = error.number if isinstance(error, Stopped) else SIGNALS.raised
                if not number:
                    raise
                self.trainer.fit_loop.teardown()  # data workers that a stopped validation leaves
                message = stop_message(number, self.trainer, self.folder, self.app)
                raise Stopped(number, message) from None

    @contextmanager
    def restore_errors(self) -> Iterator[None]:
        """Turn errors of restoring a checkpoint, before training starts, into a `RunError`."""
        try:
            yield
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            if self.same_checkpoint.restored or isinstance(error, UsageError):
                raise
            reason = f"it is damaged, {error!r}"
            if type(error) is ValueError:
                reason = str(error).rstrip(".")
            raise RunError(
                f"checkpoint '{self.invocation.resume_path}' cannot be used: {reason}"
            ) from error

    def final_metrics(self) -> dict[str, Any]:
        """Metrics of the test; without test batches, those of the last validation."""
        if self.trainer.limit_test_batches == 0:
            logged = self.trainer.callback_metrics or last_validation(self.folder)  # no steps
            return {name: float(value) for name, value in logged.items() if name.startswith("val/")}
        tested = self.trainer.test(
            self.model,
            self.datamodule,
            ckpt_path=self.best.best_model_path or None,  # without validation, the last weights
            verbose=False,
            weights_only=True,
        )
        return dict(tested[0]) if tested else {}

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write the summary; print the results and commands to try next."""
        if not self.trainer.is_global_zero:
            return
        metrics = {**metrics, **self.model.notes(), **skipped_samples(self.datamodule)}
        if self.trainer.state.fn == TrainerFn.TESTING:
            metrics |= evaluation_notes(self.trainer, self.datamodule, "test")
        folder = None
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder = self.folder
            seconds = time.perf_counter() - self.start_time
            print_texts(self.record.finish(self.trainer, self.model, metrics, seconds))
        print_skipped(self.datamodule, folder)
        commands = self.invocation.next_commands(self.same_checkpoint.ended_by, self.model)
        print_results(metrics, folder, commands)

    def validate(self) -> None:
        self.evaluate(self.trainer.validate, "val")

    def test(self) -> None:
        self.evaluate(self.trainer.test, "test")

    def evaluate(self, run: Callable[..., list[Any]], split: str) -> None:
        self.restore()
        with launch.fail_together(self.trainer):
            metrics = run(self.model, datamodule=self.datamodule, verbose=False)
            if self.trainer.is_global_zero:
                notes = {**self.model.notes(), **skipped_samples(self.datamodule)}
                notes |= evaluation_notes(self.trainer, self.datamodule, split)
                found = {**(metrics[0] if metrics else {}), **notes}
                if self.config.output:
                    folder = Path(self.config.output)
                    make_folder(folder, "--output")
                    self.model.save_results(folder, split)
                    command = self.invocation.command_line
                    save_evaluation(folder, split, self.trainer, self.model, command, found)
                print_skipped(self.datamodule, self.config.output, f"{split}_")
                print_results(found)

    def predict(self) -> None:
        assert self.invocation.checkpoint
        key = ""
        if predicts_all(self.trainer):
            key = fingerprint(self.options_to_save(), self.invocation.checkpoint)
        self.restore()
        if self.file.top_k is not None:
            self.model.problem.check_top_k(self.file.top_k)
        self.datamodule.predict_path = self.config.input
        if self.app.takes_text:
            self.datamodule.predict_text = self.config.text
        with launch.fail_together(self.trainer):
            self.model.write_predictions(self.trainer, self.datamodule, replace(self.file, key=key))
