"""`python -m tasks.seq2seq attend`: draw the cross-attention of a translation."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from datamodules.tokenizers import Tokenizer, truncation
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import Translation, translate
from modules.record import AttentionRecord
from tasks.checkpoints.exporting import new_file
from tasks.cli.text_io import format_output
from tasks.errors import UsageError, usage_errors
from tasks.inference import DeviceName, prepare_model
from tasks.seq2seq.architectures import TranslationModel, load_model
from tasks.tracking.report import plain

FIGURE_FORMATS = ("pdf", "png", "svg")
TOKEN_SIZE = 0.2  # inches
LABEL_SIZE = 0.9  # inches, beside each panel
MAX_INCHES = 200.0  # of a figure
INCOMPLETE = "\ufffd"  # text of an incomplete character
WHITESPACE = {"\n": "\u21b5", "\t": "\u21e5"}  # and a space for any other


def attend(
    ckpt_path: str,
    text: str,
    output: str = "attention.png",
    target: str | None = None,
    beams: int = 5,
    device: DeviceName = "auto",
) -> None:
    """Draw heat maps of cross-attention, target by source, for each layer and head.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        text: Sentence to translate.
        output: Picture to write, .png, .pdf or .svg.
        target: Translation to draw; null: the model's own.
        beams: Beams of the search for the model's own translation.
        device: Where to compute; auto: on a GPU if there is one.
    """
    if not text.strip():
        raise UsageError("--text is empty: give a sentence to translate")
    with usage_errors("--beams"):
        GenerationConfig(beams=beams)
    format = Path(output).suffix.removeprefix(".").lower() or "png"
    if format not in FIGURE_FORMATS:
        raise UsageError(f"--output {output}: give a name that ends in .pdf, .png or .svg")
    model = prepare_model(load_model(ckpt_path), device)
    (source,), (cut,) = model.tokenizer.encode_sources([text], model.net.max_length)
    if cut:
        print(truncation("--text", len(source), model.tokenizer.source.truncation))
    finished = True
    if target is None:
        tokens, _, finished = translate_text(model, source, beams)
    else:
        tokens, cut = encode_translation(model, target)
        if cut:
            kept = model.tokenizer.target.truncation
            print(truncation("--target", model.net.max_length, kept))
    weights = cross_attention_weights(model, source, tokens)
    sources = token_labels(model.tokenizer.source, source)
    targets = token_labels(model.tokenizer.target, tokens)
    with new_file(Path(output)) as partial, usage_errors(f"--output {output}"):
        draw(weights, sources, targets, partial, format)
    print(format_output(model.tokenizer.decode(tokens), finished))
    print(f"wrote {output}: {len(weights)} layers by {weights.shape[1]} heads")


def translate_text(model: TranslationModel, source: list[int], beams: int) -> Translation:
    config = GenerationConfig(
        model.net.max_length, temperature=0.0, beams=beams, early_stopping="likely"
    )
    return translate(model.net, [source], config, **model.tokens)[0][0]


def encode_translation(model: TranslationModel, text: str) -> tuple[list[int], bool]:
    """Returns a text as the tokens that the model would generate, and whether it was cut."""
    (ids,) = model.tokenizer.target.encode_batch([text])
    limit = model.net.max_length
    cut = len(ids) + model.tokenizer.num_special_tokens > limit
    return model.tokenizer.build_target(ids, limit)[1:], cut


@torch.inference_mode()
def cross_attention_weights(
    model: TranslationModel, source: Sequence[int], tokens: Sequence[int]
) -> Tensor:
    """Returns the attention of each generated token to each source token.

    Args:
        model: The model, whose decoder has L layers of H heads.
        source: M token ids.
        tokens: N token ids of a translation, without the start token.

    Returns:
        (L, H, N, M); rows of a decoder-only model sum to less than 1.
    """
    net = model.net
    device = net.embed.weight.device
    record = AttentionRecord()
    inputs = torch.tensor([[model.tokenizer.decoder_start_id, *tokens[:-1]]], device=device)
    net.decode(inputs, net.encode(torch.tensor([source], device=device)), cache=record)
    if record.cross_attn:
        return torch.cat(record.cross_attn).cpu()
    return torch.cat(record.self_attn)[..., -len(tokens) :, : len(source)].cpu()


def token_labels(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; special ones as in the vocabulary.

    Of a token of white space only, ␣ is a space, ⇥ a tab and ↵ the end of a line.
    """
    labels = []
    for token_id, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        text = tokenizer.decode([token_id])
        if not text.strip():
            text = "".join(WHITESPACE.get(character, "\u2423") for character in text)
        labels.append(text if text and INCOMPLETE not in text else token)
    return labels


def draw(
    weights: Tensor,
    source: Sequence[str],
    target: Sequence[str],
    path: Path | BinaryIO,
    format: str,
) -> None:
    """Draws a panel for each layer (rows) and head (columns); dark means much attention.

    Args:
        weights: (L, H, N, M).
        source: M labels.
        target: N labels.
        path: Picture to write, or an open file.
        format: Of the picture.
    """
    import matplotlib.figure

    layers, heads = weights.shape[:2]
    sources = [plain(label) for label in source]
    targets = [plain(label) for label in target]
    width = heads * (TOKEN_SIZE * len(source) + LABEL_SIZE)
    height = layers * (TOKEN_SIZE * len(target) + LABEL_SIZE)
    scale = min(1.0, MAX_INCHES / max(width, height))
    figure = matplotlib.figure.Figure(figsize=(scale * width, scale * height), layout="constrained")
    panels = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            panel = panels[layer, head]
            pixels = weights[layer, head].numpy()
            heat = panel.imshow(pixels, cmap="Blues", vmin=0, vmax=1, aspect="auto")
            title = f"layer {layer}"
            if heads > 1:
                title += f", head {head}"
            panel.set_title(title, fontsize=8)
            panel.set_xticks(range(len(source)), sources, rotation=90, fontsize=7)
            panel.set_yticks(range(len(target)), targets, fontsize=7)
    bar = figure.colorbar(heat, ax=panels, fraction=0.02, pad=0.01)
    bar.set_label("attention weight", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.supxlabel("source tokens (keys)", fontsize=8)
    figure.supylabel("target tokens (queries)", fontsize=8)
    figure.savefig(path, dpi=100, format=format)
