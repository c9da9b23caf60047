"""`python -m tasks.lm score`: how well a model predicts a text."""

import json as json_text
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.corpus import CorpusData
from datamodules.sources import CorpusOptions
from datamodules.tokenizers import TokenizerConfig
from datamodules.utils.progress import progress_bar
from modules.generation.quantized import QuantizationName
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.models.gpt import Decoder
from tasks.errors import UsageError
from tasks.lm.architectures import load_model
from tasks.tracking.report import table
from tasks.training.devices import DeviceName, prepared


@dataclass(frozen=True)
class ScoredText:
    """A text to score.

    Args:
        path: File or folder, or the id of a data set of the hub; its test split where it has one,
            else all of it.
        text_column: Column with the texts; null: text, review, sentence, content or document.
        blank_lines: Part plain text into documents at blank lines; else each file is a document.
        skip_bad: Leave out texts that cannot be used, instead of stopping at the first.
    """

    path: str
    text_column: str | None = None
    blank_lines: bool = False
    skip_bad: bool = False


def score(
    ckpt_path: str,
    data: ScoredText,
    stride: int | None = None,
    batch_size: int = 8,
    json: bool = False,
    quantize: QuantizationName | None = None,
    device: DeviceName = "auto",
) -> None:
    """Print loss, perplexity and bits per byte of a text.

    The context slides over the text in steps of the stride. Each token counts once, in the first
    window that has it, so it is predicted from at least context - stride tokens, if there are so
    many.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        data: The text.
        stride: Tokens between the starts of windows, from 1 (slow, exact) to the context; null:
            half the context.
        batch_size: Windows at a time.
        json: Print an object on a line instead of a table.
        quantize: int8: weights in a quarter of the bytes, on a CPU, a little less exact; null: as
            they are.
        device: Where to compute; auto: on a GPU if there is one.
    """
    model = prepared(load_model(ckpt_path), device, quantize)
    length = model.net.max_length
    stride = stride if stride is not None else max(1, length // 2)
    if not 1 <= stride <= length:
        raise UsageError(f"--stride {stride} must be from 1 to the context of the model, {length}")
    if batch_size < 1:
        raise UsageError(f"--batch_size {batch_size} must be at least 1")
    file = load_tokens(data, model.metadata)
    if len(file.tokens) < 2:
        raise UsageError(
            f"{data.path} has one token only, so there is nothing to predict: give a longer text"
        )
    loss, correct, tokens = total_loss(model.net, file.tokens, stride, batch_size)
    size = int(file.bytes[-1] - file.bytes_before(np.array(1)))  # bytes, without the first token
    scores = {
        "loss": loss / tokens,
        "perplexity": math.exp(loss / tokens),
        "bits_per_byte": loss / math.log(2) / size,
        "accuracy": correct / tokens,
        "tokens": tokens,
        "bytes": size,
        "context": length,
        "stride": stride,
    }
    if json:
        print(json_text.dumps(scores))
    else:
        table(data.path, scores)


def load_tokens(text: ScoredText, metadata: dict[str, Any]) -> Any:
    """Returns the tokens of the whole text, special tokens as in training, as a `TokenFile`."""
    data = CorpusData(
        "files",
        text.path,
        max_length=metadata["max_length"],
        dataset=CorpusOptions(text_column=text.text_column, blank_lines=text.blank_lines),
        tokenizer=TokenizerConfig(**metadata["tokenizer_options"]),
        skip_bad=text.skip_bad,
    )
    data.set_metadata(metadata)
    data.source.option_prefix = "--data"
    data.source.prepare()
    return data.tokenise(data.source.whole(), "the text")


@torch.inference_mode()
def total_loss(
    net: Decoder, tokens: np.ndarray, stride: int, batch_size: int
) -> tuple[float, int, int]:
    """Returns the sum of losses over all tokens but the first, correct predictions, and tokens.

    Args:
        net: The network, in evaluation mode.
        tokens: Integers (N,).
        stride, batch_size: As in `score`.
    """
    device = net.embed.weight.device
    loss = 0.0
    correct = 0
    count = 0
    total = -(-max(0, len(tokens) - 1 - net.max_length) // stride) + 1
    with progress_bar("scoring", total, least=100) as advance:
        for inputs, targets in windows(tokens, net.max_length, stride, batch_size):
            mean, hits = net.loss(net(inputs.to(device)), targets.to(device))
            counted = int((targets != IGNORE_INDEX).sum())
            loss += float(mean) * counted
            correct += int(hits)
            count += counted
            advance(len(inputs))
    return loss, correct, count


def windows(
    tokens: np.ndarray, length: int, stride: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields windows of a text and their targets, (B, T) each, -100 if an earlier window has them.

    Args:
        tokens: Integers (N,), at least 2.
        length: Tokens T of a window at most.
        stride: Tokens between the starts of windows.
        batch_size: Windows B at a time; the last, shorter one is alone.
    """
    last = len(tokens) - 1  # nothing follows it
    whole = max(0, (last - length) // stride + 1)  # windows of full length
    starts = np.arange(whole) * stride
    for part in np.split(starts, range(batch_size, whole, batch_size)) if whole else []:
        rows = part[:, None] + np.arange(length + 1)  # (B, T + 1)
        yield mask_context(tokens[rows], length, stride, part)
    done = (whole - 1) * stride + length if whole else 0  # targets so far
    if done < last:
        start = np.array([whole * stride])
        yield mask_context(tokens[None, start[0] :], length, stride, start)


def mask_context(
    rows: np.ndarray, length: int, stride: int, starts: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of windows (B, N + 1); all but the first have only new targets."""
    numbers = torch.from_numpy(rows.astype(np.int64))
    inputs, targets = numbers[:, :-1], numbers[:, 1:].clone()  # (B, N)
    targets[torch.from_numpy(starts) > 0, : length - stride] = IGNORE_INDEX
    return inputs, targets
