"""Image GPT: pictures, generation, export and probe, against transformers."""

import csv
import json
import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import ImageGPTForCausalImageModeling, ImageGPTImageProcessor

from datamodules.pixels import PixelData
from tasks.igpt.architectures import PixelModel, load_model
from tasks.igpt.pictures import SHOWN, UNKNOWN, completion_grid, sample_grid
from tasks.igpt.probe import layer_features
from tasks.igpt.task import IGPTTask
from tests.helpers.command import Console, run
from tests.helpers.results import checkpoint, summary
from tests.helpers.tiny import FEW_STEPS, TINY, picture, write_images
from tests.helpers.tiny_models import random_tokens, tiny

CKPT = "--ckpt_path"


@pytest.fixture(autouse=True)
def blank_pictures() -> None:
    """Here the pictures of runs are drawn."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a tiny model of the digits; read only."""
    folder = tmp_path_factory.mktemp("igpt")
    few = "--trainer.max_epochs 2 --trainer.limit_val_batches 1 --trainer.log_every_n_steps 1"
    assert run(f"fit {TINY['igpt']} {few} --run_dir {folder / 'r'}", "igpt") == 0
    return folder / "r"


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for transformers."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    assert run(f"export {CKPT} {trained} --output {folder}", "igpt") == 0
    return folder


@pytest.fixture(scope="module")
def theirs(exported: Path) -> Any:
    return ImageGPTForCausalImageModeling.from_pretrained(exported).eval()


def digits() -> Tensor:
    """All test digits, uint8 (S, 1, 8, 8)."""
    data = PixelData()
    data.setup("test")
    return data.dataset("test").pixels


def test_loss_is_that_of_transformers(trained: Path, exported: Path, theirs: Any) -> None:
    """Their processor makes the tokens, their model the logits, torch the loss."""
    processor = ImageGPTImageProcessor.from_pretrained(exported)
    pixels = digits()
    pictures = [Image.fromarray(one[0].numpy()).convert("RGB") for one in pixels]
    tokens = torch.as_tensor(np.array(processor(pictures)["input_ids"]))  # (S, 64)
    start = torch.full_like(tokens[:, :1], theirs.config.vocab_size - 1)
    with torch.inference_mode():
        read = torch.cat([start, tokens[:, :-1]], 1)
        logits = theirs(input_ids=read).logits
        attentions = theirs(input_ids=read[5:6], output_attentions=True).attentions
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    found = summary(trained)
    assert found["test/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["test/bits_per_dim"] == pytest.approx(loss.item() / math.log(2), rel=1e-5)
    accuracy = (logits.argmax(-1) == tokens).float().mean().item()
    assert found["test/acc"] == pytest.approx(accuracy, abs=1e-5)
    model = tessera.load(trained, kind=tessera.ImageGenerator)
    ours = model.logits(pixels[5])
    torch.testing.assert_close(ours, logits[5], atol=1e-4, rtol=1e-4)
    weights = model.attention(pixels[5]).weights  # (L, H, N, N)
    torch.testing.assert_close(weights, torch.cat(attentions), atol=1e-5, rtol=1e-4)


def test_the_most_likely_completion_is_that_of_transformers(trained: Path, theirs: Any) -> None:
    model = tessera.load(trained, kind=tessera.ImageGenerator)
    image = digits()[3]
    tokens = model.model.palette.encode(image[None])[:, :32]
    row = torch.cat([torch.tensor([[17]]), tokens], 1)
    with torch.inference_mode():
        while row.shape[1] < 65:
            row = torch.cat([row, theirs(input_ids=row).logits[:, -1:].argmax(-1)], 1)
    found = model.complete(image, temperature=0)
    assert torch.equal(found, model.model.palette.decode(row[:, 1:]))
    assert torch.equal(found[0, :, :4], image[:, :4])


def test_samples_follow_from_their_seeds(trained: Path) -> None:
    model = tessera.load(trained, kind=tessera.ImageGenerator)
    four = model.sample(4, seed=3)
    assert four.shape == (4, 1, 8, 8) and four.dtype == torch.uint8
    assert torch.equal(model.sample(1, seed=5)[0], four[2])
    assert len({tuple(one.flatten().tolist()) for one in four}) == 4
    levels = {round(level * 255 / 16) for level in range(17)}
    assert set(four.flatten().tolist()) <= levels
    with pytest.raises(tessera.UsageError, match="unknown option 'temp': choose from temperature"):
        model.sample(2, temp=2)
    for options in ({"top_k": 0}, {"beams": 2}, {"temperature": 0}, {"temperature": "1"}):
        with pytest.raises(tessera.UsageError):
            model.sample(2, **options)


def test_pictures_of_a_run(trained: Path) -> None:
    for name, columns in (("samples", 2), ("completed", 3)):
        width, height = Image.open(trained / f"{name}.png").size
        assert width >= columns * 96 and height >= 96
    clusters = json.loads((trained / "palette.json").read_text())["clusters"]
    assert len(clusters) == 17 and clusters[0] == [-1, -1, -1] and clusters[-1] == [1, 1, 1]


def grid_cells(picture: Tensor, rows: int, columns: int, side: int) -> Tensor:
    """The images in a grid without titles, (R, N, 3, S, S), from the middles of their pixels."""
    scale = -(-SHOWN // side)
    gap = max(2, side * scale // 16)
    found = torch.zeros(rows, columns, 3, side, side, dtype=torch.uint8)
    for row, column in product(range(rows), range(columns)):
        top, left = (gap + place * (side * scale + gap) + scale // 2 for place in (row, column))
        cell = picture[:, top : top + side * scale, left : left + side * scale]
        found[row, column] = cell[:, ::scale, ::scale]
    return found


@pytest.mark.parametrize("channels", [1, 3])
def test_the_lower_half_is_hidden_before_the_completions(channels: int) -> None:
    originals, first, second = torch.randint(0, 256, (3, 2, channels, 8, 8), dtype=torch.uint8)
    picture = completion_grid(originals, torch.stack([first, second], 1))
    cells = grid_cells(picture[:, 24:], 2, 4, 8)  # below the titles
    unknown = torch.tensor(UNKNOWN, dtype=torch.uint8)[:, None, None]
    assert torch.equal(cells[:, 0, :, :4], originals.expand(-1, 3, -1, -1)[:, :, :4])
    assert torch.equal(cells[:, 0, :, 4:], unknown.expand(2, 3, 4, 8))
    for column, images in enumerate((first, second, originals), 1):
        assert torch.equal(cells[:, column], images.expand(-1, 3, -1, -1))


def test_samples_are_shown_in_their_order() -> None:
    samples = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    cells = grid_cells(sample_grid(samples), 2, 2, 8).flatten(0, 1)  # (R N, 3, S, S)
    assert torch.equal(cells[:3], samples.expand(-1, 3, -1, -1))
    unknown = torch.tensor(UNKNOWN, dtype=torch.uint8)[:, None, None]
    assert torch.equal(cells[3], unknown.expand(3, 8, 8))


def test_generate(trained: Path, console: Console) -> None:
    line = f"generate {CKPT} {trained}"
    console.printed(f"{line} --samples 5 --seed 1 --output a.png", "igpt")
    console.printed(f"{line} --samples 5 --seed 1 --output b.png", "igpt")
    console.printed(f"{line} --samples 5 --seed 2 --top_p 0.9 --output c.png", "igpt")
    a, b, c = (np.array(Image.open(f"{name}.png")) for name in "abc")
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    picture(20).save("photo.png")
    console.printed(f"{line} --input photo.png --samples 2 --output d.png", "igpt")
    assert Image.open("d.png").width > 3 * Image.open("d.png").height
    write_images(Path("images"), classes=("cat",))
    Path("images/train/cat/._cat.png").write_text("of another system")
    console.printed(f"{line} --input images/train/cat --samples 2 --output e.png", "igpt")
    assert Image.open("e.png").height > 3 * Image.open("d.png").height
    for mistake, named in (
        ("--samples 0", "samples is 0"),
        ("--samples 2 --temperature 0", "temperature"),
        ("--temperature 0 --top_k 3", "top_k, top_p and min_p are for sampling"),
        ("--output a.jpg", "png"),
        ("--input missing.png", "missing.png"),
        ("--input photo.png --top_p 2", "top_p"),
    ):
        console.refused(f"{line} {mistake}", named, task="igpt")
    Path("images/train/cat/text.png").write_text("text")
    for path in ("images/train/cat/text.png", "images/train/cat"):
        said = console.refused(f"{line} --input {path}", "text.png", task="igpt", code=1)
        assert "skip_bad" not in said  # which is no option of this command
    assert not Path("generated.png").exists()


def test_features_are_the_normed_states_of_transformers(trained: Path, theirs: Any) -> None:
    model = load_model(str(trained))
    tokens = model.inputs(model.palette.encode(digits()[:6]))
    with torch.inference_mode():
        states = theirs.transformer(input_ids=tokens, output_hidden_states=True).hidden_states
        blocks = theirs.transformer.h
        # the last of their states is normed already
        expected = [block.ln_1(x).mean(1) for block, x in zip(blocks, states[:-1], strict=True)]
        expected.append(states[-1].mean(1))
    found = layer_features(model.net, tokens)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("order", ["pre", "post", "res_post", "parallel"])
def test_features_are_what_blocks_read(order: str) -> None:
    net = tiny("gpt", order=order)
    for norm in net.modules():
        if isinstance(norm, nn.LayerNorm):
            nn.init.normal_(norm.weight)
    tokens = random_tokens()
    found = []
    for block in net.stack.blocks:
        if order in ("pre", "parallel"):
            block.norm1.register_forward_hook(lambda _, inputs, normed: found.append(normed))
        else:
            block.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    with torch.no_grad():
        found.append(net(tokens))
    expected = torch.stack([states.mean(1) for states in found])  # (L + 1, B, E)
    torch.testing.assert_close(layer_features(net, tokens), expected)


def test_embed_is_the_mean_over_the_pixels(trained: Path) -> None:
    model = tessera.load(trained, kind=tessera.ImageGenerator)
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    vector = model.embed(images[1])
    with torch.no_grad():
        hidden = model.net(model.model.inputs(model.tokens(images[1])))  # (1, N, E)
    torch.testing.assert_close(vector, hidden[0].mean(0))
    found = model.embed(list(images), batch_size=2)  # a batch of two, and one of one
    torch.testing.assert_close(found[1], vector)
    torch.testing.assert_close(found[2], model.embed(images[2]))


def test_probe_of_other_images(trained: Path, console: Console) -> None:
    """With classes of their own; options that contradict the model are refused."""
    names = tuple(f"class{number}" for number in range(12))  # more than there are digits
    write_images(Path("images"), names, count=12, side=8)
    line = f"probe {CKPT} {trained} --output p"
    console.printed(f"{line} --data.path images", "igpt")
    record = json.loads(Path("p/probe.json").read_text())
    assert record["data"].endswith("images") and sum(record["samples"].values()) >= 144
    assert all(0 <= one["test"] <= 1 for one in record["results"])
    console.printed(f"{line} --data.source digits", "igpt")
    assert json.loads(Path("p/probe.json").read_text())["samples"]["test"] == 359
    console.refused(f"{line}2 --data.image_size 16", "--data.image_size", task="igpt")
    console.refused(f"{line}2 --data.palette_size 3", "--data.palette_size", task="igpt")


def test_probe(trained: Path, console: Console) -> None:
    line = f"probe {CKPT} {trained} --output p --limit"
    out, _ = console.printed(f"{line} 200", "igpt")
    assert "replace" not in out
    with Path("p/probe.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["0", "1", "2"]
    assert [row["output_of"] for row in rows] == ["embedding", "block 0", "block 1"]
    assert all(0.2 < float(row["test"]) <= 1 for row in rows)  # chance is 0.1
    assert all(float(row["val_loss"]) < math.log(10) for row in rows)
    assert Image.open("p/probe.png").format == "PNG"
    record = json.loads(Path("p/probe.json").read_text())
    assert record["model"] == str(trained) and record["samples"]["train"] == 200
    for one, row in zip(record["results"], rows, strict=True):
        assert one["test"] == pytest.approx(float(row["test"]), abs=1e-6)
    out, _ = console.printed(f"{line} 100", "igpt")
    samples = record["samples"]
    assert f"(they replace those of another probe: samples {samples})" in out
    assert "replace" not in console.printed(f"{line} 100", "igpt")[0]
    console.refused(f"probe {CKPT} {trained} --limit 0", "limit", task="igpt")


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_pretrained_brings_palette_and_size(
    kind: str, trained: Path, exported: Path, console: Console
) -> None:
    source = trained if kind == "run" else exported
    line = f"fit --data.source digits --model.pretrained {source} {FEW_STEPS} --data.batch_size 16"
    frozen = "--model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"
    more = "--model.pictures.samples 1 --model.pictures.completions 1"
    console.printed(f"{line} {frozen} {more} --run_dir again", "igpt")
    before = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    after = checkpoint("again")["state_dict"]
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, atol=1e-6, rtol=0)
    console.refused(f"{line} --data.image_size 12", "8", task="igpt")
    Path("other.json").write_text('{"clusters": [[0, 0, 0], [1, 1, 1]]}')
    refused = "leave --data.palette out"
    console.refused(f"{line} --data.palette other.json", "2 colours", refused, task="igpt")


def test_a_run_folder_is_taken_in_python(trained: Path) -> None:
    ours = tessera.load(trained, kind=tessera.ImageGenerator)
    task = IGPTTask(ours.net.config, pretrained=str(trained))
    net = task.build(ours.metadata)
    expected = torch.load(trained / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(net.embed.weight, expected["net.embed.weight"])


def test_a_folder_with_too_few_clusters_is_refused(exported: Path, console: Console) -> None:
    folder = Path("few")
    shutil.copytree(exported, folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["clusters"] = settings["clusters"][:5]
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    line = "generate --samples 1 --ckpt_path few"
    console.refused(line, "preprocessor_config.json has 5 clusters", task="igpt")


def test_loading_the_folder_of_transformers(trained: Path, exported: Path) -> None:
    ours = tessera.load(trained, kind=tessera.ImageGenerator)
    again = tessera.load(exported, kind=tessera.ImageGenerator)
    assert again.shape == (1, 8, 8)
    assert torch.equal(again.sample(2), ours.sample(2))
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8))
    assert torch.equal(again.tokens(photo), ours.tokens(photo))  # by brightness


@pytest.mark.parametrize("channels", [1, 3])
def test_other_channels_than_those_of_the_model_are_refused(
    channels: int, trained: Path, console: Console
) -> None:
    line = f"test --ckpt_path {trained} --trainer.limit_test_batches 1 --data.dataset.channels"
    if channels == 1:
        console.printed(f"{line} 1 --output t", "igpt")
    else:
        console.refused(f"{line} 3", "channels is 3", "trained with 1", task="igpt")


@pytest.mark.parametrize("options, named", [
    ("--model.net.stack.causal false", "causal"), ("--model.augment.mixup 0.5", "mixup"),
    ("--model.net.vocabulary 9", "17 colours"), ("--model.net.max_length 49", "image_size 7"),
    ("--data.palette nowhere", "nowhere"), ("--data.palette_size 1", "palette_size"),
    ("--model.pictures.samples 0", "samples"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(options: str, named: str, console: Console) -> None:
    console.refused(f"fit {TINY['igpt']} {FEW_STEPS} {options} --run_dir r", named, task="igpt")


def test_labels_that_are_no_classes_name_the_option_of_this_task(console: Console) -> None:
    write_images(Path("images"))
    files = sorted(Path("images").rglob("*.png"))
    rows = "".join(f"{file},{i / 3}\n" for i, file in enumerate(files))
    Path("numbers.csv").write_text(f"file_name,label\n{rows}")
    line = f"fit {TINY['igpt']} {FEW_STEPS} --data.path numbers.csv --run_dir r"
    named = "add --data.dataset.problem_type regression"
    console.refused(line, named, task="igpt", code=None)


def test_images_of_one_colour_stop_the_run(console: Console) -> None:
    for number in range(6):
        path = Path(f"images/train/{'ab'[number % 2]}/{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (1, 2, 3)).save(path)
    assert run(f"fit {TINY['igpt']} {FEW_STEPS} --data.path images --run_dir r", "igpt") == 1


def test_colour_images_and_a_tied_output_layer(console: Console) -> None:
    """The start token, which a tied layer can predict, is never sampled."""
    write_images(Path("images"), count=12, side=8)
    line = f"fit {TINY['igpt']} {FEW_STEPS} --preset digits --data.path images"
    line += " --data.palette_size 12 --model.net.tied true --data.dataset.val_fraction 0.3"
    console.printed(f"{line} --run_dir r", "igpt")
    model = load_model("r")
    assert isinstance(model, PixelModel) and model.net.config.output_vocabulary is None
    samples = tessera.load("r", kind=tessera.ImageGenerator).sample(20)
    assert samples.shape == (20, 3, 8, 8)
    console.refused(f"export {CKPT} r", "safetensors", task="igpt")
