"""`fit --help preset`: a line about each preset that says what it is, and the options below."""

import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from modules.models.bert import BertClassifier
from modules.models.gpt import Decoder
from modules.models.images import build_image_net
from modules.models.mae import MaskedAutoencoder
from modules.models.seq2seq import Seq2Seq
from tasks.cli.app import load
from tasks.cli.help_screens import presets_text
from tests.helpers.command import Console

# How the network of each task is built, and what its presets leave open.
NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vit": (build_image_net, {}),
    "mae": (MaskedAutoencoder, {}),
    "bert": (BertClassifier, {"num_classes": 2}),
    "lm": (Decoder, {}),
    "igpt": (Decoder, {"vocabulary": 513, "output_vocabulary": 512, "max_length": 1024}),
    "seq2seq": (Seq2Seq, {"max_length": 512}),
}
UNITS = {"M": 1e6, "B": 1e9}


def dictionaries(task: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The presets of a task, and the lines about them."""
    app = import_module(f"tasks.{task}.__main__").APP
    return load(app.presets), load(app.about_presets)


@pytest.mark.parametrize("task", [*NETWORKS, "mlm"])
def test_each_preset_has_one_line(
    task: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    presets, about = dictionaries(task)
    assert about.keys() == presets.keys()
    out, _ = console.printed("fit --help preset", task)
    lines = out.splitlines()
    for name, text in about.items():
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert line.split(maxsplit=1)[1] == text
        assert any(line.startswith(f"  {name}:") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("task", NETWORKS)
def test_lines_give_sizes_as_they_are(task: str) -> None:
    build, open_sizes = NETWORKS[task]
    presets, about = dictionaries(task)
    without = {"digits", "cifar_cpu"} if task == "igpt" else set()
    for name, text in about.items():
        config = replace(presets[name], **open_sizes)
        if tokens := re.search(r"with (\d+) tokens", text):
            names = ("vocabulary", "source_vocabulary", "target_vocabulary")
            own = {one: int(tokens[1]) for one in names if hasattr(config, one)}
            config = replace(config, **own)
        found = re.search(r"([\d.]+) ([MB]) parameters", text)
        assert (found is None) == (name in without), name
        if found:
            with torch.device("meta"):
                count = sum(p.numel() for p in build(config).parameters())
            decimals = len(found[1].partition(".")[2])
            assert f"{count / UNITS[found[2]]:.{decimals}f}" == found[1], name
        if pixels := re.search(r"(\d+) x (\d+)", text):
            assert {int(pixels[1]), int(pixels[2])} == {config.image_size}, name
        stack = getattr(config, "stack", None) or config.encoder
        if decoder := re.search(r"a decoder of (\d+)", text):
            assert config.decoder.depth == int(decoder[1]), name
        if sizes := re.search(r"(?<!decoder of )(\d+) blocks(?: of width (\d+))?", text):
            assert stack.depth == int(sizes[1]), name
            assert stack.width == int(sizes[2] or stack.width), name


def test_presets_of_your_own_need_no_line() -> None:
    presets, _ = dictionaries("mae")
    text = presets_text({"mine": presets["base"]}, {})
    assert re.search(r"^  mine\s*$", text, re.M) and "mine:" in text and "width 768" in text
