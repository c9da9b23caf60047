"""`compare`: a table of several models."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import ShuffleNet_V2_X0_5_Weights

from datamodules.images import ImageData
from datamodules.sources.images import DatasetOptions
from datamodules.vision.augment import normalise
from tasks.vit import compare
from tasks.vit.compare import Compared
from tasks.vit.other_classifiers import find_other
from tests.helpers.command import Console, Patch, run
from tests.helpers.results import table
from tests.helpers.tiny import SHORT, picture, write_images
from tests.parity.vit import cached_torchvision, timm_model

NAME = "vit_tiny_patch16_224"
SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}


@pytest.fixture
def rows(run_copy: Path, console: Console) -> dict[str, dict[str, str]]:
    """compare.csv by model: a run, another of it, a model of timm with 3 classes, and "out"."""
    theirs = timm_model(NAME, **SIZES)
    timm.models.save_for_hf(theirs, "theirs", model_args=SIZES, safe_serialization=True)
    assert run(f"fit {SHORT} --model.net.stack.mlp_width 64 --run_dir narrow") == 0
    line = f"compare {run_copy} narrow theirs --repetitions 2 --batch_size 8 --output out"
    out, _ = console.printed(line)
    assert out.count("is not tested") == 1 and "theirs is not tested" in out
    printed = Path("out/compare.md").read_text()
    assert printed in out and len(printed.splitlines()) == 5
    found = {row["model"]: row for row in table("out/compare.csv")}
    assert [*found] == [str(run_copy), "narrow", "theirs"]
    return {Path(name).name: row for name, row in found.items()}


@pytest.mark.slow
def test_figures_are_those_of_test_and_timm(rows: dict[str, dict[str, str]]) -> None:
    for folder in ("run", "narrow"):
        summary = json.loads(Path(folder, "summary.json").read_text())
        assert int(rows[folder]["parameters"]) == summary["parameters"]
        score = float(rows[folder]["test/acc"])
        every = torch.tensor([score * 359])
        assert abs(float(every) - float(every.round())) < 1e-3  # of all test images
    assert rows["theirs"]["test/acc"] == ""
    expected = sum(parameter.numel() for parameter in timm_model(NAME, **SIZES).parameters())
    expected -= 192  # of the class token's position, which is added to the token here
    assert int(rows["theirs"]["parameters"]) == expected
    assert all(float(row["images_per_s"]) > 0 for row in rows.values())
    assert int(rows["narrow"]["flop_forward"]) < int(rows["run"]["flop_forward"])


def test_the_score_is_that_of_the_test(best: Path, console: Console) -> None:
    console.printed(f"test --ckpt_path {best} --output tested")
    console.printed(f"compare {best} --repetitions 1 --batch_size 2 --output out")
    (row,) = table("out/compare.csv")
    expected = json.loads(Path("tested/test.json").read_text())["test/acc"]
    assert float(row["test/acc"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_other_problem_types_are_those_of_training(kind: str, console: Console) -> None:
    """Also in `probe`, which takes single labels only, and in `look`."""
    write_images(Path("images"), ("a", "b"), count=12, side=8)
    files = sorted(Path("images").rglob("*.png"))
    targets = [f'"{f.parent.name},{i % 2}"' if kind[0] == "m" else i for i, f in enumerate(files)]
    rows = "".join(f"{file},{target}\n" for file, target in zip(files, targets, strict=True))
    Path("table.csv").write_text(f"file_name,label\n{rows}")
    sizes = "--preset cifar_tiny --model.net.image_size 8 --model.net.stack.depth 1"
    data = f"--data.path table.csv --data.batch_size 8 --model.problem_type {kind}"
    assert run(f"fit --trainer.max_epochs 1 {sizes} {data} --run_dir r") == 0
    console.printed("test --ckpt_path r --output tested")
    tested = json.loads(Path("tested/test.json").read_text())
    out, _ = console.printed("compare r --repetitions 1 --batch_size 2 --output out")
    assert "not tested" not in out
    (row,) = table("out/compare.csv")
    (name,) = [name for name in row if name.startswith("test/")]
    assert float(row[name]) == pytest.approx(tested[name], abs=1e-5)
    console.refused("probe --ckpt_path r", "one class each")
    console.printed("probe --ckpt_path r --data.path images --k 3")
    console.printed("look --ckpt_path r --samples 1")


@pytest.mark.parametrize("source", ["r", "r.safetensors"])
def test_labels_with_other_names_are_those_of_training(source: str, console: Console) -> None:
    write_images(Path("images"), ("a", "b", "c"), count=12, side=8)
    files = sorted(Path("images").rglob("*.png"))
    rows = [f"{file},{1 + i % 3}" for i, file in enumerate(files)]
    Path("table.csv").write_text("\n".join(["file_name,label", *rows]))
    some = [row for row in rows if not row.endswith("1")]
    Path("some.csv").write_text("\n".join(["file_name,label", *some]))
    sizes = "--preset cifar_tiny --model.net.image_size 8 --model.net.stack.depth 1"
    data = "--data.path table.csv --data.batch_size 8 --data.dataset.class_names [x,y,z]"
    assert run(f"fit --trainer.max_epochs 1 {sizes} {data} --run_dir r") == 0
    if source != "r":
        console.printed(f"export --ckpt_path r --format safetensors --output {source}")
    console.printed("test --ckpt_path r --data.path some.csv --output tested")
    line = f"compare {source} --data.path some.csv --repetitions 1 --batch_size 2 --output out"
    out, _ = console.printed(line)
    assert "not tested" not in out
    expected = json.loads(Path("tested/test.json").read_text())["test/acc"]
    (row,) = table("out/compare.csv")
    assert float(row["test/acc"]) == pytest.approx(expected, abs=1e-5)


def test_images_that_a_model_may_have_been_trained_with(console: Console) -> None:
    """Another seed holds out others; only the second model has seen them."""
    write_images(Path("images"), ("a", "b", "c"), count=12, side=8)
    sizes = "--preset cifar_tiny --model.net.image_size 8 --model.net.stack.depth 1"
    for seed in (0, 7):
        data = f"--data.path images --data.batch_size 8 --data.dataset.split_seed {seed}"
        assert run(f"fit --trainer.max_epochs 1 {sizes} {data} --run_dir r{seed}") == 0
    line = "--repetitions 1 --batch_size 2"
    assert "has changed" not in "".join(console.printed(f"compare r0 {line}"))
    with pytest.warns(UserWarning, match="the training split of images has changed"):
        assert run(f"compare r0 r7 {line}") == 0


def test_speeds_of_all_sizes_are_written_alike() -> None:
    metadata = {"image_size": 8}
    speeds = (0.26, 99.96, 9_930.4, 10_650.2, 1_234_567.0)
    models = [
        Compared("a", torch.nn.Linear(1, 1), metadata, {}, images_per_s=speed) for speed in speeds
    ]
    rows = compare.table(models, "acc").splitlines()[2:]
    found = [row.split("|")[5].strip() for row in rows]
    assert found == ["0.26", "99.96", "9,930", "10,650", "1,234,567"]


def test_other_data_are_tested_whole(best: Path, console: Console) -> None:
    write_images(Path("images"), tuple("0123456789"), count=3, side=8)
    line = "--repetitions 1 --batch_size 2 --data.path images"
    out, _ = console.printed(f"compare {best} {line} --output out")
    console.printed(f"test --ckpt_path {best} --data.path images --output tested")
    (row,) = table("out/compare.csv")
    expected = json.loads(Path("tested/test.json").read_text())
    assert expected["test_samples"] == 30 and "30 images of images" in out
    assert float(row["test/acc"]) == pytest.approx(expected["test/acc"], abs=1e-6)


def test_a_cnn_of_timm_is_a_baseline(run_copy: Path, console: Console) -> None:
    """It reads larger images, with its own mean and standard deviation."""
    net = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    net.pretrained_cfg.update(mean=[0.3], std=[0.4], input_size=[1, 32, 32], crop_pct=0.8)
    digits = [*"0123456789"]
    more = {"label_names": digits, "pretrained_cfg": {**net.pretrained_cfg, "label_names": digits}}
    timm.models.save_for_hf(net, "cnn", model_config=more, safe_serialization=True)
    out, _ = console.printed(f"compare {run_copy} cnn --repetitions 1 --batch_size 2 --output out")
    assert "is not tested" not in out
    ours, theirs = table("out/compare.csv")
    assert int(theirs["parameters"]) == sum(p.numel() for p in net.parameters())
    with FlopCounterMode(display=False) as counter:
        net.eval()(torch.zeros(1, 1, 32, 32))
    assert int(theirs["flop_forward"]) == counter.get_total_flops()
    assert theirs["image_size"] == "32" and ours["image_size"] == "8"
    cfg = net.pretrained_cfg
    options = DatasetOptions(interpolation=cfg["interpolation"], crop_pct=cfg["crop_pct"])
    data = ImageData(image_size=32, dataset=options)
    data.setup("test")
    digits_32 = data.dataset("test")[[*range(359)]]
    with torch.no_grad():
        logits = net(normalise(digits_32["image"], [0.3], [0.4]))
    right = (logits.argmax(1) == digits_32["label"]).float().mean()
    assert float(theirs["test/acc"]) == pytest.approx(float(right), abs=0.003)
    settings = json.loads(Path("cnn/config.json").read_text())
    older = settings | settings.pop("pretrained_cfg")  # all entries on one level
    for content in (settings | {"pretrained_cfg": older}, older):
        Path("cnn/config.json").write_text(json.dumps(content))
        found = find_other("cnn", "compare")
        assert found is not None and found.shape == (1, 32, 32)
        metadata = found.metadata
        assert (metadata["mean"], metadata["std"], metadata["crop_pct"]) == ([0.3], [0.4], 0.8)


def test_a_model_of_torchvision_is_a_baseline(
    best: Path, console: Console, monkeypatch: Patch
) -> None:
    """Its accuracy is that of its own preprocessing; digits are none of its classes."""
    net, _ = cached_torchvision(monkeypatch)
    weights = ShuffleNet_V2_X0_5_Weights.DEFAULT
    classes = weights.meta["categories"]
    name = "torchvision/shufflenet_v2_x0_5"
    one = "--repetitions 1 --batch_size 1 --output out"
    out, _ = console.printed(f"compare {best} {name} {one}")
    assert f"{name} is not tested: the data have 10 classes" in out
    assert "the model 1000 (tench" in out and "checkpoint 1000" not in out
    row = table("out/compare.csv")[1]
    assert int(row["parameters"]) == sum(p.numel() for p in net.parameters())
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(1, 3, 224, 224))
    assert int(row["flop_forward"]) == counter.get_total_flops()
    assert row["image_size"] == "224" and row["test/acc"] == ""
    answers = set()
    for number in range(4):
        image = picture(2).resize((300, 300))
        with torch.no_grad():
            answer = int(net(weights.transforms()(image)[None]).argmax())
        answers.add(answer)
        folder = Path("images", classes[answer if number else answer - 1])
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.png")
    console.printed(f"compare {name} {one} --data.path images")
    (row,) = table("out/compare.csv")
    assert float(row["test/acc"]) == 0.75 and len(answers) > 1


BAD = {
    "": "run folders",
    "missing": "missing",
    "BEST --repetitions 0": "--repetitions",
    "BEST --batch_size 0": "--batch_size",
    "BEST --data.path missing": "missing",
    "BEST --output file/below": "--output",
    "--output out BEST": "options begin with --",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence(line: str, best: Path, console: Console) -> None:
    Path("file").write_text("")
    console.refused(f"compare {line.replace('BEST', str(best))}", BAD[line])


def test_a_run_whose_block_is_unknown_is_named(best: Path, console: Console) -> None:
    content = torch.load(best)
    content["tessera"]["net"]["stack"]["norm"] = "mine"
    torch.save(content, "own.ckpt")
    console.refused(f"compare {best} own.ckpt", "own.ckpt", "mine", "TESSERA_TRUST", code=1)


def test_help_says_what_a_model_is(console: Console) -> None:
    out, _ = console.printed("compare --help")
    assert "run folder" in out and "timm/<model>" in " ".join(out.split())
