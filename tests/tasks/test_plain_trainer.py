"""Tasks in Python: `load_from_checkpoint`, and Lightning's Trainer without our command line."""

from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, StackDataset, default_collate

from datamodules.base import ResumableDataModule
from datamodules.images import ImageData
from modules.config import StackConfig
from modules.models.vit import VIT_PRESETS, ViTConfig
from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.cli.app import load
from tasks.errors import UsageError
from tasks.options import accepted_options, build_from_options
from tasks.training.optim import OptimConfig
from tasks.vit.task import ViTTask
from tests.helpers.command import Console, run
from tests.helpers.tiny import TINY, write_data, write_images

SMALL_NET = ViTConfig(
    image_size=8,
    patch_size=4,
    channels=None,
    num_classes=None,
    stack=StackConfig(width=32, depth=1, heads=2),
)


def classes(task: str) -> tuple[Any, Any]:
    """The LightningModule and the LightningDataModule of a task."""
    app = import_module(f"tasks.{task}.__main__").APP
    return load(app.task), load(app.data)


def plain_trainer() -> pl.Trainer:
    """Lightning's Trainer, for a few steps."""
    return pl.Trainer(
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        limit_test_batches=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def plain_loader(loader: DataLoader) -> DataLoader:
    """Two batches of a loader in one of torch's own."""
    batches: Any = list(islice(loader, 2))
    return DataLoader(batches, batch_size=None)


def test_options_of_a_class_are_those_it_passes_on() -> None:
    class Base:
        def __init__(self, net: int = 1, compile: bool = False) -> None: ...

    class Closed(Base):
        def __init__(self, lr: float = 0.1) -> None: ...

    class Open(Closed, Base):
        def __init__(self, width=3, **kwargs: Any) -> None: ...  # type: ignore[no-untyped-def]

    assert accepted_options(Base, net=2, lr=0.2) == {"net": 2}
    assert accepted_options(Closed, net=2, lr=0.2) == {"lr": 0.2}
    assert accepted_options(Open, net=2, lr=0.2, width=4) == {"lr": 0.2, "width": 4}


@pytest.mark.parametrize("task", TINY)
def test_a_task_trains_in_a_plain_trainer(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data()
    limits = "--trainer.max_steps 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
    assert run(f"fit {TINY[task]} {limits} --run_dir run", task) == 0
    ckpt = "run/checkpoints/last.ckpt"
    saved = read_checkpoint(ckpt)
    kind, data_kind = classes(task)
    loaded = kind.load_from_checkpoint(ckpt, optimizer={"lr": 0.01})
    assert loaded.optimizer_config.lr == 0.01
    for name, value in loaded.net.state_dict().items():
        assert torch.equal(value, saved["state_dict"][f"net.{name}"])
    data = build_from_options(data_kind, saved[KEY]["config"]["data"], {})
    assert loaded.given_options["model"]["optimizer"]["lr"] == 0.01
    data.set_metadata(loaded.metadata)
    trainer = plain_trainer()
    trainer.fit(loaded, data)
    assert trainer.test(loaded, data, verbose=False)[0]["test/loss"] > 0
    trainer.save_checkpoint("plain.ckpt")
    again = kind.load_from_checkpoint("plain.ckpt")
    assert again.optimizer_config == loaded.optimizer_config
    first = kind.load_from_checkpoint(ckpt)
    pairs = zip(again.net.parameters(), loaded.net.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not all(map(torch.equal, again.net.parameters(), first.net.parameters()))
    training = plain_loader(data.train_dataloader())
    evaluation = plain_loader(data.val_dataloader())
    trainer = plain_trainer()
    trainer.fit(again, training, evaluation)
    assert trainer.global_step == 2
    assert trainer.test(again, evaluation, verbose=False)[0]["test/loss"] > 0


class Squares(pl.LightningDataModule):
    """Bright and dark images: {"image": uint8 (B, 1, 8, 8), "label": int64 (B,)}."""

    def train_dataloader(self) -> DataLoader:
        labels = torch.arange(64) % 2
        images = (labels * 200).to(torch.uint8)[:, None, None, None].expand(-1, 1, 8, 8)
        dataset = [{"image": i, "label": k} for i, k in zip(images, labels, strict=True)]
        return DataLoader(dataset, batch_size=16)  # type: ignore[arg-type]

    val_dataloader = train_dataloader
    test_dataloader = train_dataloader


class ResumableSquares(ResumableDataModule):
    """The same, without `labels` and "index"."""

    def load(self, split: str) -> StackDataset:
        batch = default_collate(list(Squares().train_dataloader().dataset))
        return StackDataset(**batch)


@pytest.mark.parametrize("data", [Squares(), ResumableSquares(batch_size=16)])
def test_a_new_task_trains_on_data_that_are_not_ours(data: pl.LightningDataModule) -> None:
    task = ViTTask(net=SMALL_NET, optimizer=OptimConfig(lr=1e-2, schedule="constant"))
    trainer = plain_trainer()
    with pytest.raises(UsageError) as refusal:
        trainer.fit(task, data)
    metadata = {"problem_type": "single_label_classification", "channels": 1}
    task.metadata = {**metadata, "class_names": ["dark", "bright"], "mean": [0.5], "std": [0.5]}
    assert all(f"'{name}'" in str(refusal.value) for name in task.metadata)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    with pytest.raises(UsageError, match="gradient_clip"):
        pl.Trainer(max_epochs=1, gradient_clip_val=1.0, **options).fit(task, data)
    trainer = pl.Trainer(max_epochs=3, **options)
    trainer.fit(task, data)
    assert trainer.test(task, data, verbose=False)[0]["test/acc"] == 1
    trainer.save_checkpoint("plain.ckpt")
    again = ViTTask.load_from_checkpoint("plain.ckpt")
    assert again.metadata == task.metadata
    start = ViTTask(net=SMALL_NET, pretrained="plain.ckpt")
    start.metadata = task.metadata
    assert trainer.test(start, data, verbose=False)[0]["test/acc"] == 1


def test_all_metadata_that_a_task_lacks_are_named() -> None:
    needed = {"lm": ["vocabulary", "max_length", "tokenizer_options"]}
    needed["bert"] = [*needed["lm"], "pad_id", "class_names", "problem_type"]
    for name, entries in needed.items():
        task = classes(name)[0]()
        task.trainer = plain_trainer()
        task.metadata = {"languages": None}
        with pytest.raises(UsageError) as refusal:
            task.configure_model()
        assert all(f"'{entry}'" in str(refusal.value) for entry in entries)


def test_a_preset_with_other_sizes_than_the_data_is_refused_with_the_way_out() -> None:
    data = ImageData(source="digits")
    data.setup("fit")
    metadata = data.metadata() | {"class_names": ["a", "b", "c"], "num_classes": 3}
    net = VIT_PRESETS["digits"]
    with pytest.raises(UsageError, match=r"data have 3: .*replace\(config, num_classes=None\)"):
        ViTTask(net).build(metadata)
    assert ViTTask(replace(net, num_classes=None)).build(metadata).config.num_classes == 3


def test_data_of_a_checkpoint_that_names_none(console: Console) -> None:
    data = ImageData()
    task = ViTTask(net=SMALL_NET)
    trainer = plain_trainer()
    trainer.fit(task, data)
    trainer.save_checkpoint("plain.ckpt")
    console.refused("test --ckpt_path plain.ckpt", "plain.ckpt", "--data.path", "--data.source")
    out, _ = console.printed("test --ckpt_path plain.ckpt --data.source digits")
    assert "digits" in out


def test_balanced_weights_need_all_labels() -> None:
    task = ViTTask(class_weights="balanced")
    with pytest.raises(UsageError, match="`labels`"):
        task.trainer = plain_trainer()
        task.training_labels()


def test_a_checkpoint_of_another_task_and_unknown_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = "--trainer.max_steps 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
    assert run(f"fit {TINY['vit']} {few} --run_dir run") == 0
    ckpt = "run/checkpoints/last.ckpt"
    with pytest.raises(UsageError, match="vit"):
        classes("bert")[0].load_from_checkpoint(ckpt)
    with pytest.raises(UsageError, match="no_such"):
        classes("vit")[0].load_from_checkpoint(ckpt, no_such=1)
    with pytest.raises(UsageError, match="compile"):
        classes("vit")[0].load_from_checkpoint(ckpt, compile=True)
    with pytest.raises(UsageError, match="missing.ckpt"):
        classes("vit")[0].load_from_checkpoint("missing.ckpt")


def test_other_data_than_those_of_the_weights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "one", ("cat", "dog"))
    write_images(tmp_path / "two", ("dog", "emu"))
    few = "--trainer.max_steps 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
    line = f"fit {TINY['vit']} {few} --run_dir run --data.source folder --data.path one"
    assert (
        run(f"{line} --model.net.image_size 12 --model.net.patch_size 4 --data.batch_size 2") == 0
    )
    kind, data_kind = classes("vit")
    task = kind.load_from_checkpoint("run")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(UsageError, match="class_names"):
        trainer.validate(task, data_kind("folder", "two"), verbose=False)


def test_a_checkpoint_builds_no_other_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "pwned"]}}
    for saved in (
        {"net": {"position_options": {"std": options}}},
        {"net": options},
        {"pretrained": options},
    ):
        with suppress(UsageError):
            build_from_options(classes("vit")[0], saved, {})
        assert not Path("pwned").exists()
