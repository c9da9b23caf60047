"""`python -m tasks.TASK look`: a page and figures of what is inside a trained network."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tessera.loading import find
from torch import nn

from datamodules.utils.files import path_fault, write_text
from modules.activations import activation_names, attention_parts, component
from tasks.checkpoints.exporting import check_writable
from tasks.checkpoints.reading import run_of_checkpoint
from tasks.cli.app import program
from tasks.errors import UsageError, usage_errors
from tasks.inference import DeviceName, on_device
from tasks.look.figures import save_figures
from tasks.look.inspector import Component, Inspector, Interventions, shortened
from tasks.look.inspectors import INSPECTORS, inspector_of
from tasks.look.page import render
from tasks.look.positions import position_views
from tasks.look.samples import test_inputs
from tasks.look.views import Sample, Table
from tasks.tracking.report import format_count

DRAWN = 8  # inputs whose views are figures, too


@dataclass(frozen=True, kw_only=True)
class LookOptions:
    """A network to look into.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        output: Folder to write: look.html, and the figures of the first 8 inputs as SVG and PNG;
            null: `look_inputs` in the run folder of the checkpoint, or `look` if it has none.
        ablate: Take out a head, as in 2.3 (layer 2, head 3, from 0), or a layer, as in 2, and show
            how the output changes; for a translator, these are in the decoder, encoder.2.3 is in
            the encoder and cross.2.3 in cross-attention; for a Swin, the stage comes first, as in
            stages.1.0.3.
        patch: Replace what a head or a layer adds, named as in --ablate, by what it adds for
            another input, and show how the output changes.
        patch_from: The other input, a text or an image, as long as each input; for a translator a
            text, which gets the translation of the input.
        figures: Also write the figures, which takes longer than the page.
        effects: Measure what each head does, by a forward pass without it.
        samples: Number of inputs from the test split, if none are given.
        device: Where to compute; auto: on a GPU if there is one.
    """

    ckpt_path: str
    output: str | None = None
    ablate: str | None = None
    patch: str | None = None
    patch_from: str | None = None
    figures: bool = True
    effects: bool = True
    samples: int = 3
    device: DeviceName = "auto"


@dataclass(frozen=True, kw_only=True)
class ImageOptions(LookOptions):
    """A network to look into, with images.

    Args:
        image: Picture to read, may be given several times; none: those of the test split.
    """

    image: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TextOptions(LookOptions):
    """A network to look into, with texts.

    Args:
        text: Text to read, may be given several times; none: those of the test split.
    """

    text: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PairOptions(TextOptions):
    """A network to look into, with translations.

    Args:
        target: Translation of each text; none: the model's own.
    """

    target: list[str] = field(default_factory=list)


def look_at_images(options: ImageOptions) -> None:
    """Show attention, heads and positions for images, as a page and as figures."""
    look("vit", options, images(options))


def look_at_encoders(options: ImageOptions) -> None:
    """Show attention, heads and positions of the encoder for images, as a page and as figures."""
    look("mae", options, images(options))


def look_at_pixels(options: ImageOptions) -> None:
    """Show attention, heads, positions and losses of pixels, as a page and as figures."""
    look("igpt", options, images(options))


def look_at_reviews(options: TextOptions) -> None:
    """Show attention, heads and positions for texts, as a page and as figures."""
    look("bert", options, texts(options))


def look_at_masks(options: TextOptions) -> None:
    """Show attention, heads, positions and filled masks, as a page and as figures."""
    look("mlm", options, texts(options))


def look_at_language(options: TextOptions) -> None:
    """Show attention, heads, positions, logit lens and losses, as a page and as figures."""
    look("lm", options, texts(options))


def look_at_pairs(options: PairOptions) -> None:
    """Show self- and cross-attention of translations, as a page and as figures."""
    if len(options.target) > len(options.text):
        raise UsageError("--target has no --text: give a text for each translation")
    pairs = [*zip_longest([text for (text,) in texts(options)], options.target)]
    look("seq2seq", options, pairs)


def images(options: ImageOptions) -> list[Sequence[Any]]:
    """The pictures on the command line. Raises `UsageError` if one is not there."""
    named = [("--image", path) for path in options.image]
    if options.patch_from is not None:
        named.append(("--patch_from", options.patch_from))
    for option, path in named:
        fault = path_fault(path)
        if fault is not None:
            raise UsageError(f"{option} {path} {fault}: give a picture")
    return [(path,) for path in options.image]


def texts(options: TextOptions) -> list[Sequence[Any]]:
    """The texts on the command line."""
    if not all(text.strip() for text in options.text):
        raise UsageError("--text is empty: give a text to look at")
    if options.patch_from is not None and not options.patch_from.strip():
        raise UsageError("--patch_from is empty: give a text to patch from")
    return [(text,) for text in options.text]


def look(task: str, options: LookOptions, inputs: Sequence[Sequence[Any]]) -> None:
    """Writes the page and the figures.

    Args:
        task: Name of the task.
        options: Of the command.
        inputs: Arguments of the model's `logits` for each input; none: those of the test split.
    """
    if options.samples < 1:
        raise UsageError(f"--samples {options.samples} must be at least 1")
    with printed_warnings():
        inspector = load_inspector(task, options)
        if not any(name.endswith(".weights") for name in activation_names(inspector.net)):
            raise UsageError(
                f"--ckpt_path {options.ckpt_path} has no attention to look at, as its stack.order "
                'is "mixer": in Python, `ablate` and `activations` of tessera.load show what its '
                "layers do"
            )
        interventions = read_interventions(inspector.net, options)
        if not inputs:
            inputs = test_inputs(inspector, task, options.samples)
        folder = output_folder(options)
        check_writable(folder, "--output")
        samples = [
            inspector.sample(name_of(one, index), one, interventions)
            for index, one in enumerate(inputs)
        ]
        shared = {"positions": position_views(inspector.net)}
        with usage_errors(f"--output {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        note = (
            f"{inspector.model!r}; layers and heads count from 0, rows and columns of images from 1"
        )
        write_text(folder / "look.html", render(f"Tessera {task}", note, samples, shared))
    for sample in samples:
        print_changes(sample)
    print(f"wrote {folder / 'look.html'} ({format_count(len(samples), 'input')})")
    if options.figures:
        written = save_figures(shared, folder)
        for number, sample in enumerate(samples[:DRAWN], 1):
            written += save_figures(sample.tabs, folder, f"{number}-" if len(samples) > 1 else "")
        print(f"wrote {format_count(len(written), 'figure')} as .svg and .png into {folder}")
        if len(samples) > DRAWN:
            print(f"the figures are those of the first {DRAWN} of {len(samples):,} inputs")


def output_folder(options: LookOptions) -> Path:
    """The folder of --output, or its default."""
    if options.output is not None:
        return Path(options.output)
    run = run_of_checkpoint(options.ckpt_path)
    return Path("look") if run is None else run / "look_inputs"


def load_inspector(task: str, options: LookOptions) -> Inspector:
    """The inspector of a checkpoint. Raises `UsageError` if it is of another task."""
    model = find(options.ckpt_path, "--ckpt_path")
    on_device(model.net, options.device)
    if type(model).__name__ != INSPECTORS[task].model_name:
        (other,) = [
            name for name, one in INSPECTORS.items() if one.model_name == type(model).__name__
        ]
        raise UsageError(
            f"--ckpt_path {options.ckpt_path} is of task '{other}', not '{task}': use "
            f"`{program(other)} look`"
        )
    return inspector_of(task, model)


@contextmanager
def printed_warnings() -> Iterator[None]:
    """Prints warnings, such as of a text that is cut, each once as a line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(one.message) for one in caught):
        print(message)


def read_interventions(net: nn.Module, options: LookOptions) -> Interventions:
    """What to change in the network. Raises `UsageError` if it is not there."""
    if options.patch is not None and options.patch_from is None:
        raise UsageError(f"--patch {options.patch} needs --patch_from: give the other input")
    if options.patch is None and options.patch_from is not None:
        raise UsageError("--patch_from needs --patch: give a head, as in 2.3, or a layer, as in 2")
    return Interventions(
        parse_component(net, options.ablate, "--ablate"),
        parse_component(net, options.patch, "--patch"),
        options.patch_from or "",
        options.effects,
    )


def parse_component(net: nn.Module, value: str | None, option: str) -> Component | None:
    """A head or a layer, as in 2.3, 2, cross.2.3 or stages.1.0.3; by default in the decoder."""
    if value is None:
        return None
    match = re.fullmatch(r"(?:([a-z]+|stages\.\d+)\.)?(\d+)(?:\.(\d+))?", value)
    if match is None:
        raise UsageError(
            f"{option} {value}: give a layer and a head, as in 2.3, or a layer, as in 2"
        )
    part, layer, head = match.groups()
    default = "decoder" if "decoder" in attention_parts(net) else ""
    found = Component(int(layer), None if head is None else int(head), part or default)
    with usage_errors(f"{option} {value}"):
        component(net, *found)
    return found


def name_of(inputs: Sequence[Any], index: int) -> str:
    """The beginning of an input, or its number."""
    return shortened(inputs[0]) if isinstance(inputs[0], str) else f"test sample {index}"


def print_changes(sample: Sample) -> None:
    """Prints how the output changes."""
    for tab in ("ablation", "patching"):
        for table in sample.tabs.get(tab, ()):
            if isinstance(table, Table):
                print(f"{sample.name}: {table.title}")
                width = max(len(row[0]) for row in table.rows)
                for name, before, after, change, *_ in table.rows:
                    print(f"  {name:<{width}}  {before:.4f} -> {after:.4f}  ({change:+.4f})")
