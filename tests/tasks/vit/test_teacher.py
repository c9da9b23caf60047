"""Students of image teachers on the command line: where teachers come from, and what is refused."""

import json
import re
import shutil
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import tessera
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from datamodules.images import ImageData, LoadingOptions
from datamodules.vision.augment import AugmentConfig, denormalise, normalise
from modules.config import StackConfig
from modules.models.vit import ViTConfig
from tasks.errors import DataError, UsageError
from tasks.training.distillation import TeacherConfig
from tasks.vit.task import ViTTask
from tasks.vit.teacher import ImageTeacher, load_teacher
from tests.helpers.cases import TWO, assert_same, signal_at
from tests.helpers.command import Console, Patch, run
from tests.helpers.forked import Server
from tests.helpers.marks import slow_except
from tests.helpers.results import checkpoint, logged, same, summary
from tests.helpers.tiny import FEW_STEPS, NET, Malicious, write_images
from tests.helpers.tiny_models import close
from tests.parity.vit import cached_torchvision, randomise

DIGITS = [str(digit) for digit in range(10)]
GREY = {"class_names": DIGITS, "channels": 1, "mean": [0.3], "std": [0.4]}
COLOUR = {"class_names": ["cat", "dog"], "channels": 3, "mean": [0.1, 0.2, 0.3], "std": [0.5] * 3}
FIT = f"fit {NET} {FEW_STEPS} --data.source digits --preset digits --data.batch_size 16"
OTHER = "--model.net.stack.depth 1 --model.net.stack.width 16"
DEIT = (
    "--preset deit_tiny --model.net.image_size 8 --model.net.patch_size 2 "
    "--model.net.stack.width 24 --model.net.stack.depth 1"
)
SMALL_NET = ViTConfig(
    image_size=8,
    patch_size=2,
    channels=None,
    num_classes=None,
    stack=StackConfig(width=16, depth=1, heads=2),
)
STUDENTS = {
    "deit": DEIT,
    "mixer": DEIT.replace("deit_tiny", "mixer_cifar"),
    "cct": DEIT.replace("deit_tiny", "cct_2_3x2"),
    "hybrid": DEIT.replace("deit_tiny", "hybrid_tiny").replace("patch_size 2", "patch_size 8"),
    "swin": "--preset swin_cifar --model.net.image_size 8 --model.net.patch_size 2 "
    "--model.net.window_size 2 --model.net.depths [1,1] --model.net.stack.width 8",
}
TEACHER = "--model.teacher.path teacher"
KEEP = "--model.teacher.keep_outputs true --model.augment.crop_padding 0"
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
    out, _ = console.printed(f"{FIT} {OTHER} {TEACHER} --run_dir r")
    assert re.search(r"^model .*, taught by teacher$", out, re.M)
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


class CountedTask(ViTTask):
    """Counts the images that its teacher sees."""

    seen = 0

    def load_teacher(self, source: str) -> ImageTeacher:
        teacher = super().load_teacher(source)
        teacher.net.register_forward_hook(self.count)
        return teacher

    def count(self, net: Any, inputs: Any, logits: Tensor) -> None:
        self.seen += len(logits)


@pytest.mark.parametrize("memory_limit_mb", [4096, 0])
def test_kept_outputs_teach_as_those_of_each_step(memory_limit_mb: int, teacher: Path) -> None:
    """The teacher then sees each sample once, whether images are in memory or streamed."""
    weights = []
    for keep in (False, True):
        loading = LoadingOptions(num_workers=0, memory_limit_mb=memory_limit_mb)
        data = ImageData("digits", batch_size=16, label_fraction=0.1, loading=loading)
        task = CountedTask(
            net=SMALL_NET, teacher=TeacherConfig("teacher", alpha=1.0, keep_outputs=keep)
        )
        trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, limit_val_batches=0)
        trainer.fit(task, data)
        samples = len(data.dataset("train"))
        steps = trainer.global_step
        assert steps == 3 * (samples // 16)
        assert task.seen == (samples if keep else steps * 16)
        weights.append(task.net.state_dict())
    for name, value in weights[0].items():
        close(weights[1][name], value, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", ["--model.augment.mixup 0.5", KEEP])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_student_resumes_exactly(
    ranks: int, options: str, server: Server, teacher: Path, tmp_path: Path
) -> None:
    two = TWO if ranks == 2 else ""
    line = (
        f"{FIT} {DEIT} --model.net.stack.dropout 0.1 {options} {TEACHER} {two} "
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
@pytest.mark.parametrize("options", ["--model.augment.crop_padding 0", KEEP])
def test_two_processes_learn_what_one_does(
    options: str, server: Server, teacher: Path, tmp_path: Path
) -> None:
    """Without `find_unused_parameters`; with the gradients of both halves of a batch.

    Outputs are kept in 5 batches, so that one process repeats its last, which must not count.
    """
    line = f"{FIT} {DEIT} {TEACHER} {options} --trainer.limit_test_batches 0"
    line += " --data.loading.eval_batch_size 300"
    server.run(f"{line} --run_dir one", tmp_path)
    server.run(f"{line} {TWO} --data.batch_size 8 --run_dir two", tmp_path, ranks=2)
    assert logged(tmp_path / "two") == pytest.approx(logged(tmp_path / "one"), rel=1e-4)
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


@pytest.mark.slow
@pytest.mark.parametrize("network", STUDENTS)
def test_each_network_of_ours_teaches(network: str) -> None:
    """A DeiT with the mean of both heads."""
    assert run(f"{FIT} {STUDENTS[network]} --trainer.limit_test_batches 0 --run_dir it") == 0
    model = tessera.load("it", kind=tessera.ImageClassifier)
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    found = load_teacher("it", GREY)
    mean, std = (model.metadata[name] for name in ("mean", "std"))
    expected = model.net(normalise(images, mean, std))
    close(found.logits(normalise(images, [0.3], [0.4])), expected, atol=1e-4)


def test_a_model_of_timm_by_name_teaches(monkeypatch: Patch) -> None:
    """From the cache of the hub, where a download puts it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("cache").resolve()))
    net = randomise(timm.create_model("test_resnet"))
    folder = Path(f"cache/models--{net.pretrained_cfg['hf_hub_id'].replace('/', '--')}")
    (folder / "snapshots/1").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("1")
    save_file(net.state_dict(), folder / "snapshots/1/model.safetensors")
    names = timm.data.ImageNetInfo("imagenet-1k").label_names()
    found = load_teacher("timm/test_resnet", {**COLOUR, "class_names": names[::-1]})
    images = torch.randint(0, 256, (2, 3, *net.pretrained_cfg["input_size"][1:]), dtype=torch.uint8)
    mean, std = (list(net.pretrained_cfg[name]) for name in ("mean", "std"))
    logits = found.logits(normalise(images, COLOUR["mean"], COLOUR["std"]))
    close(logits, net(normalise(images, mean, std)).flip(1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("channels", [3, 1])
def test_any_model_of_timm_in_a_folder_teaches(channels: int) -> None:
    """Grey images are the same in each of its channels."""
    net = randomise(timm.create_model("test_resnet", num_classes=2))
    folder = timm_folder(net, "test_resnet", label_names=["dog", "cat"])
    images = torch.randint(0, 256, (3, channels, 40, 40), dtype=torch.uint8)
    ours = {name: COLOUR[name][:channels] for name in ("mean", "std")}
    found = load_teacher(folder, {**COLOUR, **ours, "channels": channels})
    logits = found.logits(normalise(images, **ours))
    expected = net(normalise(images.expand(-1, 3, -1, -1), [0.2, 0.3, 0.4], [0.6] * 3)).flip(1)
    close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_torchvision_teaches(monkeypatch: Patch) -> None:
    net, file = cached_torchvision(monkeypatch)
    names = timm.data.ImageNetInfo("imagenet-1k").label_names()[::-1]
    metadata = {**COLOUR, "class_names": names}
    images = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    found = load_teacher("torchvision/shufflenet_v2_x0_5", metadata)
    weights = torchvision.models.ShuffleNet_V2_X0_5_Weights.DEFAULT
    transforms = weights.transforms(resize_size=224)
    pixels = normalise(images, metadata["mean"], metadata["std"])
    close(found.logits(pixels), net(transforms(images)).flip(1), atol=1e-3, rtol=1e-3)
    torch.save({"weight": Malicious()}, file)
    with pytest.raises(UsageError, match="torchvision/shufflenet_v2_x0_5"):
        load_teacher("torchvision/shufflenet_v2_x0_5", metadata)
    assert not Path("pwned").exists()


@pytest.mark.slow
def test_a_model_of_torchvision_that_changes_its_input_teaches(monkeypatch: Patch) -> None:
    """GoogLeNet normalises images in its own way if it has weights, else not."""
    net, _ = cached_torchvision(monkeypatch, "googlenet", init_weights=False, aux_logits=True)
    names = timm.data.ImageNetInfo("imagenet-1k").label_names()
    means = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    found = load_teacher("torchvision/googlenet", {**COLOUR, **means, "class_names": names})
    pixels = torch.randn(2, 3, 224, 224)
    plain = net(pixels)
    net.transform_input = True
    close(found.logits(pixels), net(pixels), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(plain, net(pixels), atol=1e-2)


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
    write_images(Path("images"), ("cat", "dog"), side=8)
    for file in Path("images").rglob("*.png"):
        file.write_bytes(b"no image")  # which is not read before the teacher is missed
    other = f"fit {NET} {FEW_STEPS} --data.path images --run_dir r --model.teacher.path nowhere"
    console.refused(other, "--model.teacher.path nowhere")
    with pytest.raises(UsageError, match="resnet50"):
        load_teacher("torchvision/resnet5", GREY)
    with pytest.raises(UsageError, match="did you mean 'resnet18'"):
        load_teacher("timm/resnet_18", GREY)
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


def test_outputs_are_not_kept_of_images_that_change(console: Console) -> None:
    keep = TeacherConfig("teacher", keep_outputs=True)
    ViTTask(teacher=keep, augment=AugmentConfig())
    for field in fields(AugmentConfig):
        if field.name != "rand_augment_magnitude":
            with pytest.raises(UsageError, match=f"model.augment.{field.name} 0, or"):
                ViTTask(teacher=keep, augment=AugmentConfig(**{field.name: 1}))
    options = f"{TEACHER} {KEEP} --model.augment.flip 0.5 --model.augment.mixup 0.2"
    wanted = "add --model.augment.flip 0 --model.augment.mixup 0"
    console.refused(f"{FIT} {options} --run_dir r", "--model.teacher.keep_outputs", wanted)


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
