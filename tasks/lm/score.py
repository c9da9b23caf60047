"""`python -m tasks.lm score`: how well a model predicts a text."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from datamodules.corpus import CorpusData
from datamodules.sources import CorpusOptions
from datamodules.sources.documents import DocumentSource, Piece, split_pieces
from datamodules.sources.texts import require_texts
from datamodules.tokenizers import TokenizerConfig
from datamodules.utils.errors import DataError
from datamodules.utils.progress import progress_bar
from modules.kernels.cross_entropy import IGNORE_INDEX, LOGITS_PER_CHUNK
from modules.lm_heads import TokenHead
from modules.models.gpt import Decoder
from tasks.cli.text_io import printing_to
from tasks.errors import UsageError, usage_errors
from tasks.inference import InferenceOptions, prepare_model
from tasks.lm.architectures import NOT_CAUSAL, load_model
from tasks.predictions import Score
from tasks.tracking.report import table

TITLE_WIDTH = 60  # characters of a text in the title of its table


@dataclass(frozen=True)
class ScoredText:
    """How to read a text to score.

    Args:
        source: Format of `input`: txt, csv, jsonl or hub; null: as the path shows.
        text_column: Column with the texts; null: text, review, sentence, content or document.
        blank_lines: Split plain text into documents at blank lines; else each file is a document.
        skip_bad: Leave out texts that cannot be used, instead of stopping at the first.
    """

    source: Literal["txt", "csv", "jsonl", "hub"] | None = None
    text_column: str | None = None
    blank_lines: bool = False
    skip_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(InferenceOptions):
    """Print loss, perplexity and bits per byte of a text.

    A window of the model's context slides over the text by the stride. Each token counts once, in
    the first window that has it, so at least context - stride tokens precede it there, except at
    the beginning of the text. Documents are scored apart if the model was trained with
    `--data.packing documents`.

    Args:
        text: Text to score instead of `input`; may be given several times.
        input: File, folder, or id of a data set of the hub: its test split if it has one, else all.
        data: How to read `input`.
        output: File for what is printed; null: standard output.
        stride: Tokens between the starts of windows, from 1 (slow, exact) to the context; null:
            half the context.
        batch_size: Windows at a time.
        json: Print a JSON object for each text instead of a table.
    """

    text: list[str] = field(default_factory=list)
    input: str | None = None
    data: ScoredText = ScoredText()
    output: str | None = None
    stride: int | None = None
    batch_size: int = 8
    json: bool = False


def score(options: ScoreOptions) -> None:
    """Print loss, perplexity and bits per byte of a text."""
    if bool(options.text) == (options.input is not None):
        raise UsageError("score reads a text: give either --text or --input")
    # `skip_bad` is for texts, too
    if options.text and replace(options.data, skip_bad=False) != ScoredText():
        raise UsageError("--data says how to read --input: leave it out with --text")
    if options.text:
        require_texts(options.text, "--text")
    model = prepare_model(load_model(options.ckpt_path), options.device, options.quantize)
    stride = check_windows(model.net, options.stride, options.batch_size)
    texts: list[str | None] = [*options.text] or [None]
    files = [load_tokens(options.input, text, options.data, model.metadata) for text in texts]
    packing = model.metadata.get("packing", "windows")  # models of Hugging Face do not say
    for file in files:
        if not len(bounds(file, packing)[0]):
            name = options.input or "--text"
            each = " in each document" if packing == "documents" else ""
            raise UsageError(
                f"{name} has only one token{each}, nothing to predict: give a longer text"
            )
    with printing_to(options.output):
        for text, file in zip(texts, files, strict=True):
            scores = score_file(model.net, file, packing, stride, options.batch_size)
            if options.json:
                print(json.dumps(scores))
            else:
                table(options.input or textwrap.shorten(text or "", TITLE_WIDTH), scores)


def bounds(file: Any, packing: str) -> tuple[Any, Any]:
    """Where each text with a token to predict begins and ends, the end excluded."""
    begin, end = np.array([0]), np.array([len(file.tokens)])
    if packing == "documents":
        has_prefix = int(file.offsets[0] > 0)  # a separator before each
        begin, end = file.offsets[:-1] - has_prefix, file.offsets[1:]
    predicts = end - begin > 1
    return begin[predicts], end[predicts]


def score_file(
    net: Decoder, file: Any, packing: str, stride: int, batch_size: int
) -> dict[str, Any]:
    """Scores of a `TokenFile` by name, of each document alone if `packing` is "documents".

    Other arguments as in `total_losses`.
    """
    begin, end = bounds(file, packing)
    texts = [file.tokens[first:last] for first, last in zip(begin, end, strict=True)]
    found = total_losses(net, texts, stride, batch_size)
    loss, correct, tokens = map(sum, zip(*found, strict=True))
    # The first token of a text is not predicted.
    num_bytes = int((file.bytes_before(end) - file.bytes_before(begin + 1)).sum())
    return {
        **asdict(Score.of(loss, tokens, num_bytes)),
        "accuracy": correct / tokens,
        "bytes": num_bytes,
        "context": net.max_length,
        "stride": stride,
    }


def check_windows(net: Decoder, stride: int | None, batch_size: int) -> int:
    """Returns the stride of windows, by default half the context.

    Raises `UsageError` if it is not from 1 to the context, `batch_size` is below 1, or the decoder
    has no causal mask.
    """
    if not net.config.stack.causal:
        raise UsageError(f"{NOT_CAUSAL}, and a score means nothing: train one with the mask")
    length = net.max_length
    if stride is None:
        stride = max(1, length // 2)
    if not 1 <= stride <= length:
        raise UsageError(f"stride is {stride}, but must be from 1 to the context, {length}")
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, but must be at least 1")
    return stride


class GivenText(DocumentSource):
    """One document, the text of --text."""

    name = "--text"
    embedded = True

    def __init__(self, text: str, skip_bad: bool) -> None:
        super().__init__(None, CorpusOptions(), skip_bad)
        with usage_errors("--text"):
            text.encode()  # bytes of the command line that are not UTF-8 raise
        self.text = text

    def has(self, split: str) -> bool:
        return split == "train"

    def read(self, split: str) -> Iterator[Piece]:
        yield from split_pieces([(self.text, True)])


def load_tokens(
    path: str | None, text: str | None, reading: ScoredText, metadata: dict[str, Any]
) -> Any:
    """Returns the `TokenFile` of a text or else of a path, with special tokens as in training."""
    try:
        data = CorpusData(
            reading.source,
            path,
            max_length=metadata["max_length"],
            dataset=CorpusOptions(text_column=reading.text_column, blank_lines=reading.blank_lines),
            tokenizer=TokenizerConfig(**metadata["tokenizer_options"]),
            skip_bad=reading.skip_bad,
        )
    except UsageError as error:  # it names the options of `fit`
        raise UsageError(str(error).replace("--data.path", "--input")) from error
    if text is not None:
        data.source = GivenText(text, reading.skip_bad)
    data.set_metadata(metadata)
    data.source.option_prefix = "--data."
    data.source.path_option = "--input"
    data.source.prepare()
    try:
        return data.tokenise(data.source.whole(), "the text")
    except DataError as error:
        if text is None:
            raise
        raise UsageError(str(error)) from error  # the text is an option


@torch.inference_mode()
def total_losses(
    net: Decoder,
    texts: Sequence[np.ndarray],
    stride: int,
    batch_size: int,
    progress: bool = True,
) -> list[tuple[float, int, int]]:
    """Returns sum of losses, correct predictions and number of all tokens but the first, per text.

    Args:
        net: The model.
        texts: Token ids of each, (N,), at least 2.
        stride: Tokens between the starts of windows.
        batch_size: Windows at a time; of several texts, the longest first.
        progress: Show a bar.
    """
    device = net.embed.weight.device
    losses = [0.0] * len(texts)
    correct = [0] * len(texts)
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    remaining = (
        (number, *window)
        for number in order
        for window in windows(texts[number], net.max_length, stride)
    )
    total = sum(len(window_starts(text, net.max_length, stride)) for text in texts)
    with progress_bar("scoring", total if progress else 0, least=100) as advance:
        while batch := list(islice(remaining, batch_size)):
            numbers, inputs, targets = zip(*batch, strict=True)
            padded = pad_sequence([*inputs], batch_first=True)  # (B, T), behind the tokens
            states = net(padded.to(device))  # (B, T, E)
            for number, hidden, target in zip(numbers, states, targets, strict=True):
                loss, right = window_loss(net, hidden[: len(target)], target.to(device))
                losses[number] += float(loss)
                correct[number] += int(right)
            advance(len(batch))
    counts = [len(text) - 1 for text in texts]
    return list(zip(losses, correct, counts, strict=True))


def window_loss(net: Decoder, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of losses and number of correct predictions of vectors (N, E) with targets (N,)."""
    if isinstance(net.head, TokenHead) and not net.head._forward_hooks:
        mean, right = net.loss(hidden[None], target[None])  # (1, N, E), (1, N)
        return mean * (target != IGNORE_INDEX).sum(), right
    # A layer for inference has no table of its own, and `intervene` changes logits, not `loss`.
    loss = torch.zeros((), device=hidden.device)
    right = torch.zeros((), dtype=torch.int64, device=hidden.device)
    rows = max(1, LOGITS_PER_CHUNK // net.vocabulary)
    for some, wanted in zip(hidden.split(rows), target.split(rows), strict=True):
        logits = net.logits(some).float()  # (n, V)
        loss = loss + F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
        right = right + ((logits.argmax(-1) == wanted) & (wanted != IGNORE_INDEX)).sum()
    return loss, right


def window_starts(tokens: np.ndarray, length: int, stride: int) -> range:
    """Where the windows of a text begin; see `windows`."""
    return range(0, max(1, len(tokens) - 1 - length + stride), stride)


def windows(tokens: np.ndarray, length: int, stride: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields windows of a text and their targets, (T,) each; each token is a target once.

    Other targets are -100: those of an earlier window.

    Args:
        tokens: Token ids (N,), at least 2.
        length: Tokens T of a window; the last may have fewer.
        stride: Tokens between the starts of windows.
    """
    for start in window_starts(tokens, length, stride):
        window = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))  # (T + 1,)
        targets = window[1:].clone()
        if start > 0:
            targets[: length - stride] = IGNORE_INDEX
        yield window[:-1], targets
