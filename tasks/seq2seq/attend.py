"""`python -m tasks.seq2seq attend`: which source tokens each token of a translation looks at."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from datamodules.tokenizers import Tokenizer
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import Translation, translate
from modules.record import AttentionRecord
from tasks.checkpoints.exporting import new_file
from tasks.cli.text_io import printed
from tasks.errors import UsageError, usage_errors
from tasks.seq2seq.translator import Model, load_model
from tasks.training.devices import DeviceName, prepared

KINDS = ("pdf", "png", "svg")  # of pictures
CELL, LABELS, WIDEST = 0.2, 0.9, 200.0  # inches: of a token, beside each panel, of a figure
BROKEN = "\ufffd"  # what decoding makes of a part of a character


def attend(
    ckpt_path: str,
    text: str,
    out: str = "attention.png",
    target: str | None = None,
    beams: int = 5,
    device: DeviceName = "auto",
) -> None:
    """Draw heat maps of cross-attention, target by source, for each layer and head.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        text: Sentence to translate.
        out: Picture to write; its ending says of which kind: png, pdf or svg.
        target: Translation to look at; null: the model's own.
        beams: Width of the beam search for that.
        device: Where to compute; auto: on a GPU if there is one.
    """
    if not text.strip():
        raise UsageError("--text is empty: give a sentence to translate")
    if beams < 1:
        raise UsageError(f"--beams {beams} must be at least 1")
    kind = Path(out).suffix.removeprefix(".").lower() or "png"
    if kind not in KINDS:
        raise UsageError(
            f"--out {out} ends in .{kind}, which is no kind of picture here: use .png, .pdf or .svg"
        )
    model = prepared(load_model(ckpt_path), device)
    (source,), (cut,) = model.tokenizer.sources([text], model.net.max_length)
    if cut:
        print(
            f"the text is longer than the {len(source)} tokens that the model reads, and is drawn without the rest"
        )
    if target is None:
        tokens, _, finished = own_translation(model, source, beams)
    else:
        tokens, finished = given_translation(model, target), True
    weights = cross_weights(model, source, tokens)
    with new_file(Path(out)) as partial, usage_errors(f"--out {out}"):
        draw(
            weights,
            spelled(model.tokenizer.source, source),
            spelled(model.tokenizer.target, tokens),
            partial,
            kind,
        )
    print(printed(model.tokenizer.decode(tokens), finished))
    print(f"wrote {out}: {len(weights)} layers by {weights.shape[1]} heads")


def own_translation(model: Model, source: list[int], beams: int) -> Translation:
    """What the model itself writes, as `translate` would."""
    config = GenerationConfig(
        model.net.max_length, temperature=0.0, beams=beams, early_stopping="likely"
    )
    return translate(model.net, [source], config, **model.ends)[0][0]


def given_translation(model: Model, text: str) -> list[int]:
    """The tokens of a translation, as the model would write them; says if they are not all."""
    (ids,) = model.tokenizer.target.encode_batch([text])
    if len(ids) + model.tokenizer.added > model.net.max_length:
        most = model.net.max_length
        print(
            f"--target is longer than the {most} tokens that the model writes, and is drawn without the rest"
        )
    return model.tokenizer.frame_target(ids, model.net.max_length)[1:]


@torch.inference_mode()
def cross_weights(model: Model, source: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """What share of its attention each token looks at each source token with, when it is written.

    Args:
        model: The model, whose decoder has L layers of H heads.
        source: M token numbers.
        tokens: N token numbers of a translation, without the token that it starts with.

    Returns:
        (L, H, N, M); where one stack reads both texts, each row sums to what is left for the source.
    """
    net, record = model.net, AttentionRecord()
    where = net.embed.weight.device
    read = torch.tensor([[model.tokenizer.start, *tokens[:-1]]], device=where)  # (1, N)
    net.decode(read, net.encode(torch.tensor([source], device=where)), cache=record)
    if record.cross_attn:
        return torch.cat(record.cross_attn).cpu()
    return torch.cat(record.self_attn)[..., -len(tokens) :, : len(source)].cpu()


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Tokens as a reader knows them: their text, spaces as ␣, or the vocabulary's name where they have none."""
    texts = [tokenizer.decode([number]) for number in ids]
    shown = [text if text.strip() else "\u2423" * len(text) for text in texts]
    pairs = zip(shown, tokenizer.tokens(ids), strict=True)
    return [text if text and BROKEN not in text else name for text, name in pairs]


def draw(
    weights: Tensor, source: Sequence[str], target: Sequence[str], path: Path | BinaryIO, kind: str
) -> None:
    """Draw a panel for each layer (rows) and head (columns), dark where a token looks.

    Args:
        weights: (L, H, N, M).
        source: M labels.
        target: N labels.
        path: Picture to write, or a file to write it to.
        kind: Its format.
    """
    import matplotlib.figure

    layers, heads = weights.shape[:2]
    names = [
        [label.replace("$", r"\$") for label in labels] for labels in (source, target)
    ]  # it begins a formula
    width, height = heads * (CELL * len(source) + LABELS), layers * (CELL * len(target) + LABELS)
    share = min(1.0, WIDEST / max(width, height))
    figure = matplotlib.figure.Figure(figsize=(share * width, share * height), layout="constrained")
    panels = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            panel = panels[layer, head]
            panel.imshow(weights[layer, head].numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
            panel.set_title(
                f"layer {layer + 1}" + (f", head {head + 1}" if heads > 1 else ""), fontsize=8
            )
            panel.set_xticks(range(len(source)), names[0], rotation=90, fontsize=7)
            panel.set_yticks(range(len(target)), names[1], fontsize=7)
    figure.savefig(path, dpi=100, format=kind)
