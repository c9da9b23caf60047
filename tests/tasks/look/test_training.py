"""`fit --look_every`: what it keeps, and that it changes nothing."""

import csv
import signal
from pathlib import Path
from typing import Any

import pytest
import tessera
import torch
from scipy.stats import entropy

from tasks.look.inspector import Interventions
from tasks.look.inspectors import INSPECTORS, inspector_of
from tasks.look.page import png
from tasks.look.training import look_callback
from tasks.look.views import Heads, Matrix
from tasks.tracking.loggers import STEP
from tests.helpers.browser import Browser
from tests.helpers.cases import signal_at
from tests.helpers.command import ROOT, Console, process, run
from tests.helpers.forked import Server
from tests.helpers.page import content, tab_views, unpacked
from tests.helpers.results import checkpoint, logged, same
from tests.helpers.tiny import TINY, picture, write_data, write_images
from tests.helpers.tiny_models import close
from tests.helpers.wandb_files import end_run, history, records, scalars
from tests.tasks.look.test_page import needs_browser
from tests.tasks.tracking.test_wandb import KILL_AFTER_SENDING

FEW = "--trainer.limit_train_batches 4 --trainer.limit_test_batches 0 --trainer.limit_val_batches 1"
SWIN = (
    f"{FEW} --trainer.max_epochs 1 --preset swin_cifar --data.source digits --data.batch_size 16 "
    "--model.net.image_size 9 --model.net.patch_size 1 --model.net.window_size 3 "
    "--model.net.depths [2,1] --model.net.stack.depth 3 --model.net.stack.width 8"
)
BOTH = " ".join(f"--config {ROOT}/configs/logger/{name}.yaml" for name in ("wandb", "tensorboard"))
TWO = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy"
GPUS = "import tasks.distributed.launch as l; l.GPU_STRATEGIES = set()"  # as if there were some


def curves(run_folder: Path) -> dict[str, list[float]]:
    """The columns of `curves.csv`."""
    with open(run_folder / "look/curves.csv", newline="") as file:
        names, *rows = csv.reader(file)
    return {name: [*map(float, column)] for name, *column in zip(names, *rows, strict=True)}


def shown(run_folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the page has, by tab."""
    return tab_views(content(run_folder / "look/look.html"))


def fit(options: str, task: str, folder: Path = Path("seen")) -> Path:
    assert (
        run(f"fit {TINY[task]} {FEW} --trainer.max_epochs 1 {options} --run_dir {folder}", task)
        == 0
    )
    return folder


# What is measured ---------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["vit", "mae"])
def test_images_as_look_sees_them(task: str, tmp_path: Path) -> None:
    """The last step's values are those of the last weights; distances as in `look`, in pixels."""
    options = "--look_every 4 --model.net.pool cls --model.net.register_tokens 2"
    folder = fit(options, task)
    model: Any = tessera.load(folder / "checkpoints/last.ckpt")
    image = checkpoint(folder)["callbacks"]["TrainingLook"]["batch"]["image"][0]
    sample = INSPECTORS[task](model).sample("", (image,), Interventions(effects=False))
    (distance,) = [view for view in sample.tabs["heads"] if view.title.startswith("mean distance")]
    assert isinstance(distance, Matrix)
    values = curves(folder)
    assert values["step"] == [4]
    assert values["distance/layer 0"] == [pytest.approx(float(distance.values[0].mean()), abs=1e-5)]
    weights = model.attention(image).weights  # (1, H, N, N)
    nats = entropy(weights.numpy(), axis=-1).mean()
    assert values["entropy/layer 0"] == [pytest.approx(nats, abs=1e-5)]
    (heads,) = shown(folder)["attention"]
    assert heads["grid"] == [4, 4] and heads["image"].startswith("data:image/png")
    assert heads["keys"] == model.attention(image).keys
    figures = {path.name for path in (folder / "look").glob("*-by-layer.*")}
    names = ("entropy", "distance", "gradient-norm")
    assert figures == {f"{name}-by-layer.{end}" for name in names for end in ("png", "svg")}


def test_windows_as_look_sees_them(tmp_path: Path) -> None:
    """Of each stage of a Swin, in the grid of its own."""
    assert run(f"fit {SWIN} --look_every 2 --run_dir r") == 0
    model = tessera.load("r/checkpoints/last.ckpt", kind=tessera.ImageClassifier)
    image = checkpoint("r")["callbacks"]["TrainingLook"]["batch"]["image"][0]
    tabs = inspector_of("vit", model).sample("", (image,), Interventions(effects=False)).tabs
    values = curves(Path("r"))
    assert values["step"] == [2, 4]
    for stage, heads in enumerate(tabs["attention"]):
        assert isinstance(heads, Heads) and heads.image is not None
        found = shown(Path("r"))["attention"][stage]
        assert found["title"] == f"{heads.title} over the training"
        assert (found["keys"], found["grid"]) == (heads.keys, [*(heads.grid or ())])
        assert found["image"] == png(heads.image)
        close(unpacked(found)[-1], heads.weights[0], atol=0.005)
        for view in tabs["heads"][2 * stage : 2 * stage + 2]:
            assert isinstance(view, Matrix)
            measure = "entropy" if view.title.startswith("entropy") else "distance"
            for layer, expected in enumerate(view.values.mean(-1).tolist()):
                name = f"{measure}/stages.{stage} layer {layer}"
                assert values[name][-1] == pytest.approx(expected, abs=1e-5)
                assert min(values[f"gradient norm/stages.{stage} layer {layer}"]) > 0


@pytest.mark.parametrize("depths", ["[2,1]", "[3]"])
def test_stages_of_many_tokens_have_gradients_only(depths: str, tmp_path: Path) -> None:
    line = f"fit {SWIN} --model.net.image_size 33 --model.net.depths {depths} --look_every 4"
    with pytest.warns(UserWarning, match="1,089 tokens"):
        assert run(f"{line} --run_dir r") == 0
    names = {"step", *(f"gradient norm/layer {layer}" for layer in range(3))}
    if depths == "[2,1]":
        names = {f"gradient norm/stages.{one}" for one in ("0 layer 0", "0 layer 1", "1 layer 0")}
        names |= {"step", "entropy/stages.1 layer 0", "distance/stages.1 layer 0"}
    assert {*curves(Path("r"))} == names
    titles = ["self-attention in windows of stage 1 over the training"] * (depths == "[2,1]")
    assert [view["title"] for view in shown(Path("r")).get("attention", [])] == titles
    measures = {view["title"].removesuffix(" by layer") for view in shown(Path("r"))["curves"]}
    assert measures == {name.partition("/")[0] for name in names - {"step"}}


def test_pixels_as_look_sees_them(tmp_path: Path) -> None:
    """Of those that are predicted; the animation has the key that `look` adds."""
    folder = fit("--look_every 2", "igpt")
    model = tessera.load(folder / "checkpoints/last.ckpt", kind=tessera.ImageGenerator)
    image = checkpoint(folder)["callbacks"]["TrainingLook"]["batch"]["image"][0]
    tabs = INSPECTORS["igpt"](model).sample("", (image,), Interventions(effects=False)).tabs
    values = curves(folder)
    for name, view in zip(("entropy", "distance"), tabs["heads"], strict=False):
        assert isinstance(view, Matrix)
        for layer in range(2):
            expected = pytest.approx(float(view.values[layer].mean()), abs=1e-4)
            assert values[f"{name}/layer {layer}"][-1] == expected
    (shown_heads,) = shown(folder)["attention"]
    (heads,) = tabs["attention"]
    assert isinstance(heads, Heads)
    assert (shown_heads["queries"], shown_heads["keys"]) == (heads.queries, heads.keys)
    close(unpacked(shown_heads)[-1], heads.weights[0], atol=0.01)
    assert shown_heads["image"] == png(model.pixels(image))


def test_translations_with_their_tokens(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder, decoder and cross-attention of the first validation pair."""
    monkeypatch.chdir(runs)
    folder = fit("--look_every 2", "seq2seq", runs / "seen_seq2seq")
    model = tessera.load(folder / "checkpoints/last.ckpt", kind=tessera.Translator)
    cross, encoder, decoder = shown(folder)["attention"]
    source, target = cross["keys"], cross["queries"]
    assert source[-1] == target[-1] == "[EOS]" and len(target) > 2
    assert [word.upper() for word in source[:-1]] == target[:-1]
    assert encoder["queries"] == encoder["keys"] == source
    assert decoder["queries"] == decoder["keys"] == ["[BOS]", *target[:-1]]
    weights = model.attention(" ".join(source[:-1]), " ".join(target[:-1])).weights
    values = curves(folder)
    for layer in range(2):
        nats = entropy(weights[layer].numpy(), axis=-1).mean()
        name = f"entropy/cross-attention layer {layer}"
        assert values[name][-1] == pytest.approx(nats, abs=1e-5)
    expected = {"step", *(f"entropy/cross-attention layer {layer}" for layer in range(2))}
    for measure in ("entropy", "distance", "gradient norm"):
        for part in ("encoder", "decoder"):
            expected |= {f"{measure}/{part} layer {layer}" for layer in range(2)}
    assert set(values) == expected


@pytest.mark.parametrize(
    "task, options",
    [
        ("bert", "--trainer.precision bf16-true"),
        ("mlm", "--data.next_sentence true --model.net.segments 2"),
        ("lm", "--data.packing documents --trainer.precision bf16-mixed"),
        ("seq2seq", "--model.net.architecture prefix"),
    ],
)
@pytest.mark.plain_every(2)
def test_texts(task: str, options: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens as labels, without padding, and steps of two micro-batches."""
    monkeypatch.chdir(runs)
    more = "--trainer.accumulate_grad_batches 2 --look_every 1"
    folder = fit(f"{options} {more}", task, runs / f"texts_{task}")
    (heads,) = shown(folder)["attention"]
    assert heads["steps"] == ["step 1", "step 2"] and heads["shape"][:3] == [2, 2, 2]
    assert heads["queries"] == heads["keys"] and "[PAD]" not in heads["keys"]
    assert len(set(heads["keys"])) > 3 and len(heads["keys"]) == heads["shape"][-1]
    values = curves(folder)
    assert values["step"] == [1, 2] and min(values["gradient norm/layer 1"]) > 0


def test_small_gradient_norms_keep_their_digits(tmp_path: Path) -> None:
    """A resumed run writes the curves of its checkpoint, too."""
    folder = fit("--look_every 2", "vit")
    path = folder / "checkpoints/last.ckpt"
    saved = torch.load(path, weights_only=True)
    kept = saved["callbacks"]["TrainingLook"]["curves"]
    kept["gradient norm/layer 0"] = [1.23456e-8 for _ in kept["gradient norm/layer 0"]]
    torch.save(saved, path)
    assert run(f"fit --resume {folder} --trainer.max_epochs 2") == 0
    norms = curves(folder)["gradient norm/layer 0"]
    assert norms[:2] == [1.23456e-8] * 2 and len(norms) == 4 and norms[2] > 1e-6


def test_gradient_norms_are_those_before_clipping(tmp_path: Path) -> None:
    options = "--look_every 1 --trainer.log_every_n_steps 1 --model.optimizer.gradient_clip 0.01"
    folder = fit(f"{options} --model.optimizer.layer_grad_norms true", "vit")
    assert curves(folder)["gradient norm/layer 0"] == pytest.approx(
        logged(folder, "grad_norm/stack.0"), rel=1e-3
    )


# The weights of the training stay the same --------------------------------------------------------


def test_looking_changes_no_weight(tmp_path: Path, console: Console) -> None:
    """Also not if there is no validation; with few steps there is nothing to draw."""
    options = "--model.net.stack.dropout 0.1 --trainer.limit_val_batches 0"
    plain, seen, late = (
        fit(f"{options} {look}", "vit", tmp_path / name)
        for name, look in (("a", ""), ("b", "--look_every 2"), ("c", "--look_every 5"))
    )
    expected = checkpoint(plain)["state_dict"]
    for folder in (seen, late):
        found = checkpoint(folder)["state_dict"]
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert curves(seen)["step"] == [2, 4]
    assert not (plain / "look").exists() and not (late / "look").exists()
    assert run(f"fit {TINY['vit']} --trainer.fast_dev_run true --look_every 1 --run_dir d") == 0
    assert not Path("d").exists()
    console.refused("fit --look_every 0 --run_dir none", "--look_every 0")
    with pytest.raises(tessera.UsageError, match="vit, .*not 'linear'"):
        look_callback(2, Path("none"), "linear")


def test_a_damaged_image_is_not_the_sample(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", count=16)
    (images / "val/cat").mkdir(parents=True)
    for number in range(2):
        picture(12).save(images / f"val/cat/{number}.png")
    whole = (images / "val/cat/0.png").read_bytes()
    (images / "val/cat/0.png").write_bytes(whole[: len(whole) // 2])
    line = "--preset digits --data.source folder --data.path images --data.skip_bad true"
    line += f" --data.loading.memory_limit_mb 0 {FEW} --trainer.max_epochs 1"
    assert run(f"fit {line} --data.batch_size 4 --look_every 2 --run_dir seen") == 0
    assert checkpoint("seen")["callbacks"]["TrainingLook"]["batch"]["index"].tolist() == [1]


# Resumed runs, several processes ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_keeps_each_step_once(ranks: int, server: Server, tmp_path: Path) -> None:
    """Page, curves and sample are those of an uninterrupted run."""
    line = f"fit {TINY['vit']} --trainer.limit_train_batches 12 --trainer.limit_test_batches 0 "
    line += "--trainer.limit_val_batches 1 --trainer.max_epochs 1 --look_every 2 --run_dir r "
    line += "--checkpoint.every_n_train_steps 5" + f" {TWO} ddp" * (ranks == 2)
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    server.run(line, folders[0], ranks=ranks)
    running = server.start(line, folders[1], before=signal_at("step"), ranks=ranks)  # after 7 steps
    assert running.wait(slice(1)) == [-signal.SIGKILL]
    running.kill(ranks=slice(1, None))
    assert checkpoint(folders[1] / "r")["global_step"] == 5
    server.run("fit --resume r", folders[1], ranks=ranks)
    whole, killed = (folder / "r" for folder in folders)
    assert curves(whole)["step"] == [2, 4, 6, 8, 10, 12]
    assert curves(killed) == curves(whole)
    assert content(killed / "look/look.html") == content(whole / "look/look.html")
    kept = [checkpoint(folder)["callbacks"]["TrainingLook"] for folder in (whole, killed)]
    assert same(*kept)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["vit", "mae", "mlm", "seq2seq"])
def test_sharded_weights(task: str, server: Server, tmp_path: Path) -> None:
    """The same values as with whole weights."""
    found = []
    for strategy in ("fsdp", "ddp"):
        folder = tmp_path / strategy
        folder.mkdir()
        write_data(folder, texts=40)
        line = f"fit {TINY[task]} {FEW} --trainer.max_epochs 1 --look_every 2 {TWO} {strategy}"
        server.run(f"{line} --run_dir r", folder, task, before=GPUS, ranks=2)
        found.append(curves(folder / "r"))
    assert found[0].keys() == found[1].keys() and found[0]["step"][0] == 2
    for name, line in found[0].items():
        assert line == pytest.approx(found[1][name], rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(("option", "is_imported"), [("", False), ("--look_every 2", True)])
def test_fit_imports_what_draws_attention_only_if_asked(
    option: str, is_imported: bool, tmp_path: Path
) -> None:
    before = "import atexit; atexit.register(lambda: print('tasks.look' in sys.modules))"
    line = f"fit {TINY['vit']} {FEW} --trainer.max_epochs 1 --run_dir r {option}"
    done = process(line, before, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(is_imported)


# Loggers ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_loggers_have_each_step_once(tmp_path: Path) -> None:
    """Of a run that was killed and resumed: values, and a picture of each kind of attention."""
    pytest.importorskip("tensorboard")
    write_data(tmp_path)
    line = f"fit {TINY['seq2seq']} {BOTH} --trainer.limit_val_batches 1 --look_every 2 --run_dir r"
    line += " --trainer.limit_test_batches 0 --checkpoint.every_n_train_steps 5"
    done = process(line, KILL_AFTER_SENDING, "seq2seq", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert run("fit --resume r", "seq2seq") == 0
    end_run()
    values = curves(Path("r"))
    assert values["step"] == [2, 4, 6, 8, 10]
    sent: dict[tuple[str, int], set[float]] = {}  # W&B shows the first value of a step
    for row in history(records(Path("r"))):
        for name in row.keys() - {STEP}:
            sent.setdefault((name, row[STEP]), set()).add(row[name])
    events, counts = scalars("r")
    for name, line in values.items():
        logged_name = f"look/{name}".replace(" ", "_")
        for step, value in zip((1, 3, 5, 7, 9), line, strict=True) if name != "step" else ():
            (found,) = sent[logged_name, step]
            assert found == pytest.approx(value, rel=1e-5)
            assert counts[logged_name, step] == 1
    for site in ("cross-attention", "encoder_self-attention", "decoder_self-attention"):
        assert all((f"look/{site}/width", step) in sent for step in (1, 3, 5, 7, 9))
        steps = [image.step for image in events.Images(f"look/{site}")]  # the reader keeps four
        assert len({*steps}) == len(steps) == 4 and {*steps} < {1, 3, 5, 7, 9}
        assert {path.suffix for path in Path("r").rglob(f"media/images/look/{site}*")} == {".png"}


# The page -----------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_browser
def test_the_animation_in_a_browser(tmp_path: Path) -> None:
    page = fit("--look_every 2", "vit") / "look/look.html"
    with Browser(tmp_path / "profile") as browser:
        browser.open(page)
        slider, label = (f"document.querySelector('.bar {tag}')" for tag in ("input", "span"))
        assert browser.evaluate(f"{label}.textContent") == "step 4"
        large = "document.querySelector('.large canvas').toDataURL()"
        browser.wait("document.querySelector('.large canvas')")
        last = browser.evaluate(large)
        browser.evaluate(f"{slider}.value = 0; {slider}.oninput()")
        assert browser.evaluate(f"{label}.textContent") == "step 2"
        browser.wait(f"{large} !== {last!r}")
        browser.evaluate("document.querySelector('.bar button').click()")  # play
        browser.wait(f"{label}.textContent === 'step 4'")
        browser.tab("curves")
        text = browser.evaluate("document.querySelector('main').textContent")
        assert all(name in text for name in ("entropy", "distance", "gradient norm", "layer 0"))
        assert browser.errors() == []
