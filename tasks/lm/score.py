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
from tasks.inference import DeviceName, prepared
from tasks.lm.architectures import load_model
from tasks.tracking.report import table


@dataclass(frozen=True)
class ScoredText:
    """A text to score.

    Args:
        path: File, folder, or id of a data set of the hub: its test split if it has one, else all.
        text_column: Column with the texts; null: text, review, sentence, content or document.
        blank_lines: Split plain text into documents at blank lines; else each file is a document.
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

    A window of the model's context slides over the text by the stride. Each token counts once, in
    the first window that has it, so at least context - stride tokens precede it there, except at
    the beginning of the text.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout.
        data: The text.
        stride: Tokens between the starts of windows, from 1 (slow, exact) to the context; null:
            half the context.
        batch_size: Windows at a time.
        json: Print a JSON object instead of a table.
        quantize: int8: weights in a quarter of the memory, on a CPU, slightly less exact; null: as
            they are.
        device: Where to compute; auto: on a GPU if there is one, but int8 on the CPU.
    """
    model = prepared(load_model(ckpt_path), device, quantize)
    length = model.net.max_length
    if stride is None:
        stride = max(1, length // 2)
    if not 1 <= stride <= length:
        raise UsageError(f"--stride {stride} must be from 1 to the context of the model, {length}")
    if batch_size < 1:
        raise UsageError(f"--batch_size {batch_size} must be at least 1")
    file = load_tokens(data, model.metadata)
    if len(file.tokens) < 2:
        raise UsageError(f"{data.path} has only one token, nothing to predict: give a longer text")
    loss, correct, tokens = total_loss(model.net, file.tokens, stride, batch_size)
    num_bytes = int(file.bytes[-1] - file.bytes_before(np.array(1)))  # without the first token
    scores = {
        "loss": loss / tokens,
        "perplexity": math.exp(loss / tokens),
        "bits_per_byte": loss / math.log(2) / num_bytes,
        "accuracy": correct / tokens,
        "tokens": tokens,
        "bytes": num_bytes,
        "context": length,
        "stride": stride,
    }
    if json:
        print(json_text.dumps(scores))
    else:
        table(data.path, scores)


def load_tokens(text: ScoredText, metadata: dict[str, Any]) -> Any:
    """Returns the `TokenFile` of the whole text, with special tokens as in training."""
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
    """Returns sum of losses, correct predictions and number of all tokens (N,) but the first."""
    device = net.embed.weight.device
    loss = 0.0
    correct = 0
    count = 0
    total = -(-max(0, len(tokens) - 1 - net.max_length) // stride) + 1  # windows
    with progress_bar("scoring", total, least=100) as advance:
        for inputs, targets in windows(tokens, net.max_length, stride, batch_size):
            mean, right = net.loss(net(inputs.to(device)), targets.to(device))
            new = int((targets != IGNORE_INDEX).sum())
            loss += float(mean) * new
            correct += int(right)
            count += new
            advance(len(inputs))
    return loss, correct, count


def windows(
    tokens: np.ndarray, length: int, stride: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields windows of a text and their targets, (B, T) each; each token is a target once.

    Other targets are -100: those of an earlier window, and those beyond the end of the text.

    Args:
        tokens: Token ids (N,), at least 2.
        length: Tokens T of a window; fewer if the text is shorter.
        stride: Tokens between the starts of windows.
        batch_size: Windows B at a time.
    """
    last = len(tokens) - 1
    starts = np.arange(0, max(1, last - length + stride), stride)
    offsets = np.arange(min(length, last))
    for first in range(0, len(starts), batch_size):
        start = starts[first : first + batch_size, None]  # (B, 1)
        index = np.minimum(start + offsets, last)  # (B, T); the last token pads
        inputs = tokens[index].astype(np.int64)
        targets = tokens[np.minimum(index + 1, last)].astype(np.int64)
        is_earlier = (start > 0) & (offsets < length - stride)
        targets[is_earlier | (index == last)] = IGNORE_INDEX
        yield torch.from_numpy(inputs), torch.from_numpy(targets)
