"""`python -m tasks.lm score`: how well a model foresees a text."""

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
        path: File or folder, or the id of a data set of the hub; its test split where it has one, else all of it.
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

    The context slides over the text in steps of the stride. Each token counts once: in the first window that it is in,
    so that it is foreseen from at least context - stride tokens before it, where there are so many.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        data: The text.
        stride: Tokens by which windows are apart, from 1 (slow, exact) to the context; null: half the context.
        batch_size: Windows at a time.
        json: Print an object on a line instead of a table.
        quantize: int8: weights in a quarter of the bytes, on a CPU, a little less exact; null: as they are.
        device: Where to compute; auto: on a GPU if there is one.
    """
    model = prepared(load_model(ckpt_path), device, quantize)
    length = model.net.max_length
    stride = stride if stride is not None else max(1, length // 2)
    if not 1 <= stride <= length:
        raise UsageError(f"--stride {stride} must be from 1 to the context of the model, {length}")
    if batch_size < 1:
        raise UsageError(f"--batch_size {batch_size} must be at least 1")
    file = corpus(data, model.facts)
    if len(file.tokens) < 2:
        raise UsageError(
            f"{data.path} has one token only, which nothing can be foreseen from: give a longer text"
        )
    loss, right, tokens = total(model.net, file.tokens, stride, batch_size)
    bytes_ = int(
        file.bytes[-1] - file.bytes_before(np.array(1))
    )  # nothing foresees the first token
    found = {
        "loss": loss / tokens,
        "perplexity": math.exp(loss / tokens),
        "bits_per_byte": loss / math.log(2) / bytes_,
        "accuracy": right / tokens,
        "tokens": tokens,
        "bytes": bytes_,
        "context": length,
        "stride": stride,
    }
    print(json_text.dumps(found)) if json else table(data.path, found)


def corpus(text: ScoredText, facts: dict[str, Any]) -> Any:
    """The tokens of all of the text, with special tokens as in training: a `TokenFile`."""
    data = CorpusData(
        "files",
        text.path,
        max_length=facts["max_length"],
        dataset=CorpusOptions(text_column=text.text_column, blank_lines=text.blank_lines),
        tokenizer=TokenizerConfig(**facts["tokenizer_options"]),
        skip_bad=text.skip_bad,
    )
    data.adopt(facts)
    data.source.option_prefix = "--data"
    data.source.prepare()
    return data.tokens(data.source.whole(), "the text")


@torch.inference_mode()
def total(net: Decoder, tokens: np.ndarray, stride: int, batch_size: int) -> tuple[float, int, int]:
    """Sum of the losses of all tokens but the first, how many were foreseen rightly, and how many there are.

    Args:
        net: The network, in evaluation mode.
        tokens: Integers (N,).
        stride, batch_size: As in `score`.
    """
    device, loss, right, count = net.embed.weight.device, 0.0, 0, 0
    windows = -(-max(0, len(tokens) - 1 - net.max_length) // stride) + 1
    with progress_bar("scoring", windows, least=100) as advance:
        for inputs, targets in batches(tokens, net.max_length, stride, batch_size):
            mean, hits = net.loss(net(inputs.to(device)), targets.to(device))
            counted = int((targets != IGNORE_INDEX).sum())
            loss, right, count = loss + float(mean) * counted, right + int(hits), count + counted
            advance(len(inputs))
    return loss, right, count


def batches(
    tokens: np.ndarray, length: int, stride: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows over a text and their targets, (B, T) each, -100 where one was a target before.

    Args:
        tokens: Integers (N,), at least 2.
        length: Tokens T of a window at most.
        stride: Tokens by which windows are apart.
        batch_size: Windows B at a time; those that the text ends in stand alone.
    """
    last = len(tokens) - 1  # nothing follows it
    whole = max(0, (last - length) // stride + 1)  # windows of full length
    starts = np.arange(whole) * stride
    for part in np.split(starts, range(batch_size, whole, batch_size)) if whole else []:
        rows = part[:, None] + np.arange(length + 1)  # (B, T + 1)
        yield _counted(tokens[rows], length, stride, part)
    done = (whole - 1) * stride + length if whole else 0  # targets so far
    if done < last:
        start = np.array([whole * stride])
        yield _counted(tokens[None, start[0] :], length, stride, start)


def _counted(
    rows: np.ndarray, length: int, stride: int, starts: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of windows (B, N + 1) that begin at `starts` (B,): all count in the first, else new ones."""
    numbers = torch.from_numpy(rows.astype(np.int64))
    inputs, targets = numbers[:, :-1], numbers[:, 1:].clone()  # (B, N)
    targets[torch.from_numpy(starts) > 0, : length - stride] = IGNORE_INDEX
    return inputs, targets
