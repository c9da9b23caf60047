"""Students of image teachers on the command line: where teachers come from, and what is refused."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import tessera
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch.nn import functional as F

from datamodules.vision.augment import denormalise, normalise
from tasks.errors import DataError, UsageError
from tasks.vit.teacher import load_teacher
from tests.helpers.cases import TWO, assert_same, signal_at
from tests.helpers.command import Console, Patch, run
from tests.helpers.forked import Server
from tests.helpers.marks import slow_except
from tests.helpers.results import checkpoint, logged, same, summary
from tests.helpers.tiny import FEW_STEPS, NET, Malicious
from tests.helpers.tiny_models import close
from tests.parity.vit import randomise

DIGITS = [str(digit) for digit in range(10)]
GREY = {"class_names": DIGITS, "channels": 1, "mean": [0.3], "std": [0.4]}
COLOUR = {"class_names": ["cat", "dog"], "channels": 3, "mean": [0.1, 0.2, 0.3], "std": [0.5] * 3}
FIT = f"fit {NET} {FEW_STEPS} --data.source digits --preset digits --data.batch_size 16"
OTHER = "--model.net.stack.depth 1 --model.net.stack.width 16"
DEIT = (
    "--preset deit_tiny --model.net.image_size 8 --model.net.patch_size 2 "
    "--model.net.stack.width 24 --model.net.stack.depth 1"
)
STUDENTS = {
    "deit": DEIT,
    "mixer": DEIT.replace("deit_tiny", "mixer_cifar"),
    "cct": DEIT.replace("deit_tiny", "cct_2_3x2"),
    "hybrid": DEIT.replace("deit_tiny", "hybrid_tiny").replace("patch_size 2", "patch_size 8"),
}
TEACHER = "--model.teacher.path teacher"
BEST = "checkpoints/best.ckpt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a teacher of digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        assert run(f"{FIT} --run_dir teacher") == 0
        return Path("teacher").resolve()


@pytest.fixture
def teacher(trained: Path) -> Path:
    """A copy of it in this test's folder."""
    return Path(shutil.copytree(trained, "teacher"))


def timm_folder(net: Any, architecture: str, **more: Any) -> str:
    """Saves a model of timm as its `save_for_hf` does."""
    Path("cnn").mkdir()
    cfg = {"mean": [0.2, 0.3, 0.4], "std": [0.6] * 3, "input_size": [3, 40, 40]}
    settings = {"architecture": architecture, "num_classes": 2, "pretrained_cfg": cfg, **more}
    Path("cnn/config.json").write_text(json.dumps(settings))
    save_file(net.state_dict(), "cnn/model.safetensors")
    return "cnn"


# What a run does ----------------------------------------------------------------------------------


def test_only_training_needs_the_teacher(teacher: Path, console: Console) -> None:
    assert run(f"{FIT} {OTHER} {TEACHER} --run_dir r") == 0
    plain = summary("r")
    teacher.rename("moved")
    saved = checkpoint("r")
    assert all(name.startswith("net.") for name in saved["state_dict"])
    assert saved["tessera"]["config"]["model"]["teacher"]["path"] == "teacher"
    more = "--trainer.max_epochs 2"
    console.refused(f"fit --resume r {more}", "--model.teacher.path teacher", "moved")
    assert run("test --ckpt_path r --trainer.limit_test_batches 1 --output out") == 0
    assert json.loads(Path("out/test.json").read_text())["test/acc"] == plain["test/acc"]
    assert tessera.load("r").net.config.stack.depth == 1
    assert run(f"fit --resume r {more} --model.teacher.path moved") == 0
    assert checkpoint("r")["global_step"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("student", STUDENTS)
def test_each_student_learns_from_it(student: str, teacher: Path) -> None:
    """Another teacher leaves other weights behind; all weights learn."""
    line = f"{FIT} {STUDENTS[student]} --trainer.limit_test_batches 0"
    for alpha in (0.0, 1.0):
        options = f"{TEACHER} --model.teacher.alpha {alpha} --run_dir {student}{alpha}"
        assert run(f"{line} {options}") == 0
    assert run(f"{line} --run_dir alone") == 0
    alone, none, all_ = (
        checkpoint(name)["state_dict"] for name in ("alone", f"{student}0.0", f"{student}1.0")
    )
    assert not same(none, all_)
    assert same(alone, none) == (student != "deit")  # whose second head then learns nothing


@pytest.mark.parametrize("precision", slow_except(["bf16-mixed"], ["bf16-mixed", "bf16-true"]))
def test_in_16_bits(precision: str, teacher: Path) -> None:
    more = "--model.teacher.kind hard --model.augment.mixup 0.5 --model.augment.cutmix 0.5"
    line = f"{FIT} {DEIT} {TEACHER} --trainer.precision {precision} {more} --run_dir r"
    assert run(line) == 0
    assert len(logged("r", "train/loss")) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_student_resumes_exactly(
    ranks: int, server: Server, teacher: Path, tmp_path: Path
) -> None:
    two = TWO if ranks == 2 else ""
    line = (
        f"{FIT} {DEIT} --model.net.stack.dropout 0.1 --model.augment.mixup 0.5 {TEACHER} {two} "
        "--trainer.max_epochs 2 --trainer.limit_train_batches 8 --checkpoint.every_n_train_steps 2 "
        "--run_dir r"
    )
    for name in ("here", "there"):
        shutil.copytree(teacher, tmp_path / name / "teacher")
    server.run(line, tmp_path / "there", ranks=ranks)
    running = server.start(line, tmp_path / "here", "vit", signal_at("step"), ranks)
    (code,) = running.wait(slice(0, 1))
    running.kill(ranks=slice(1, None))
    assert code == -signal.SIGKILL
    server.run("fit --resume r", tmp_path / "here", ranks=ranks)
    assert_same(tmp_path / "here/r", tmp_path / "there/r")


@pytest.mark.slow
def test_two_processes_learn_what_one_does(server: Server, teacher: Path, tmp_path: Path) -> None:
    """Without `find_unused_parameters`; with the gradients of both halves of a batch."""
    line = f"{FIT} {DEIT} {TEACHER} --model.augment.crop_padding 0 --trainer.limit_test_batches 0"
    server.run(f"{line} --run_dir one", tmp_path)
    server.run(f"{line} {TWO} --data.batch_size 8 --run_dir two", tmp_path, ranks=2)
    one, two = (checkpoint(tmp_path / name)["state_dict"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        close(two[name], value, atol=2e-3)


# Where teachers come from -------------------------------------------------------------------------


def test_our_teacher_sees_what_it_was_trained_on(teacher: Path) -> None:
    model = tessera.load(teacher, kind=tessera.ImageClassifier)
    mean, std = (model.metadata[name] for name in ("mean", "std"))
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    names = DIGITS[::-1]
    found = load_teacher("teacher", {**GREY, "class_names": names})
    pixels = normalise(images, [0.3], [0.4])
    expected = model.net(normalise(images, mean, std)).flip(1)
    close(found.logits(pixels), expected, atol=1e-4)
    close(denormalise(pixels, [0.3], [0.4]), images.float(), atol=1e-3)
    assert not found.net.training
    assert not found.logits(pixels.requires_grad_()).requires_grad
    large = torch.randint(0, 256, (4, 1, 20, 20), dtype=torch.uint8)
    resized = F.interpolate(large.float(), (8, 8), mode="bilinear", antialias=True)
    expected = model.net(normalise(resized, mean, std)).flip(1)
    close(found.logits(normalise(large, [0.3], [0.4])), expected, atol=1e-4)


def test_any_model_of_timm_in_a_folder_teaches() -> None:
    net = randomise(timm.create_model("test_resnet", num_classes=2))
    folder = timm_folder(net, "test_resnet", label_names=["dog", "cat"])
    images = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    found = load_teacher(folder, COLOUR).logits(normalise(images, COLOUR["mean"], COLOUR["std"]))
    expected = net(normalise(images, [0.2, 0.3, 0.4], [0.6] * 3)).flip(1)
    close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_torchvision_teaches(monkeypatch: Patch) -> None:
    """Of weights in torch's cache, as a download leaves them."""
    monkeypatch.setenv("TORCH_HOME", str(Path("home").resolve()))
    weights = torchvision.models.ShuffleNet_V2_X0_5_Weights.DEFAULT
    net = randomise(torchvision.models.shufflenet_v2_x0_5())
    file = Path("home/hub/checkpoints", Path(weights.url).name)
    file.parent.mkdir(parents=True)
    torch.save(net.state_dict(), file)
    names = timm.data.ImageNetInfo("imagenet-1k").label_names()[::-1]
    metadata = {**COLOUR, "class_names": names}
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    found = load_teacher("torchvision/shufflenet_v2_x0_5", metadata)
    transforms = weights.transforms(resize_size=224)
    pixels = normalise(images, metadata["mean"], metadata["std"])
    close(found.logits(pixels), net(transforms(images)).flip(1), atol=1e-3, rtol=1e-3)
    torch.save({"weight": Malicious()}, file)
    with pytest.raises(UsageError, match="torchvision/shufflenet_v2_x0_5"):
        load_teacher("torchvision/shufflenet_v2_x0_5", metadata)
    assert not Path("pwned").exists()


def test_an_export_teaches(teacher: Path) -> None:
    assert run("export --ckpt_path teacher --format safetensors --output it.safetensors") == 0
    pixels = torch.randn(2, 1, 8, 8)
    expected = load_teacher("teacher", GREY).logits(pixels)
    close(load_teacher("it.safetensors", GREY).logits(pixels), expected)


# Refused ------------------------------------------------------------------------------------------


def test_teachers_that_do_not_fit(teacher: Path, console: Console) -> None:
    line = f"{FIT} --run_dir r"
    console.refused(f"{line} --model.teacher.kind hard", "--model.teacher.path")
    console.refused(f"{line} --model.teacher.path nowhere", "--model.teacher.path nowhere")
    with pytest.raises(UsageError, match="resnet50"):
        load_teacher("torchvision/resnet5", GREY)
    with pytest.raises(DataError, match="timm/resnet18"):
        load_teacher("timm/resnet18", GREY)
    with pytest.raises(UsageError, match="10 classes.*have 2.*'0' of the teacher and 'cat' of the"):
        load_teacher("teacher", COLOUR)
    saved = torch.load(teacher / BEST, weights_only=True)
    torch.save({**saved, "tessera": {**saved["tessera"], "task": "bert"}}, teacher / BEST)
    with pytest.raises(UsageError, match=r"--model\.teacher\.path.*'bert'"):
        load_teacher("teacher", GREY)
    torch.save({**saved, "extra": Malicious()}, teacher / BEST)
    console.refused(f"{line} {TEACHER}", "code")
    assert not Path("pwned").exists()


def test_folders_of_timm_that_do_not_fit() -> None:
    net = timm.create_model("test_resnet", num_classes=2)
    folder = timm_folder(net, "test_resnet")
    load_teacher(folder, COLOUR)  # without names: in the order of the data
    with pytest.raises(UsageError, match="2 classes and the data have 3"):
        load_teacher(folder, {**COLOUR, "class_names": [*"abc"]})
    path = Path("cnn/config.json")
    settings = json.loads(path.read_text())
    cfg = {**settings["pretrained_cfg"], "input_size": [1, 40, 40]}
    for more, named in (
        ({"architecture": "test_resnets"}, "test_resnet"),
        ({"num_classes": 3}, "config.json"),
        ({"model_args": {"checkpoint_path": "evil.pth"}}, "checkpoint_path"),
        ({"problem_type": "regression"}, "regression"),
        ({"pretrained_cfg": cfg}, "1 channels"),
    ):
        path.write_text(json.dumps(settings | more))
        with pytest.raises(UsageError, match=named):
            load_teacher(folder, COLOUR)
    path.write_text(json.dumps(settings))
    Path("cnn/model.safetensors").unlink()
    torch.save({"weight": Malicious()}, "cnn/pytorch_model.bin")
    with pytest.raises(UsageError, match="code"):
        load_teacher(folder, COLOUR)
    assert not Path("pwned").exists()
