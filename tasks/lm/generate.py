"""`python -m tasks.lm generate`: texts that continue prompts."""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modules.generation.beam_search import beam_search
from modules.generation.quantized import QuantizationName
from modules.generation.sampling import GenerationConfig
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.cli.text_io import json_line, read_lines
from tasks.errors import UsageError
from tasks.lm.architectures import LanguageModel, load_model
from tasks.lm.streaming import (
    StreamBatch,
    TextStream,
    end_tokens,
    prompt_tokens,
    stream_texts,
)
from tasks.training.devices import DeviceName, prepared

MAX_SAMPLES = 10_000  # for each prompt; memory is taken for all of them


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationConfig):
    """Write texts that continue prompts.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout,
            whose generation_config.json then has the defaults.
        prompt: Beginning of the text; may be given several times. None at all: the beginning of a
            document.
        prompt_file: File with a prompt on each line; - is standard input.
        num_samples: Texts for each prompt, the first sampled with `seed`, the next with one more;
            in beam search the best ones.
        stop: String that ends a text and is no part of it; may be given several times.
        json: Print an object on a line for each text, when it is done: prompt, text, number of new
            tokens, how it ended (length, end of the document, stop string, or in beam search the
            context), and its score in beam search.
        strict: Refuse a prompt that is longer than the context, or than beam search has room for in
            it, instead of reading its last part only.
        quantize: int8: weights in a quarter of the bytes, on a CPU, a little less exact; null: as
            they are.
        device: Where to compute; auto: on a GPU if there is one.
    """

    ckpt_path: str
    prompt: list[str] = field(default_factory=list)
    prompt_file: str | None = None
    num_samples: int = 1
    stop: list[str] = field(default_factory=list)
    json: bool = False
    strict: bool = False
    quantize: QuantizationName | None = None
    device: DeviceName = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise ValueError(
                f"num_samples is {self.num_samples}; it must be from 1 to {MAX_SAMPLES:,}."
            )
        if self.temperature == 0 and self.beams == 1 < self.num_samples:
            raise ValueError(
                f"num_samples is {self.num_samples}, but at temperature 0 all are the same text; "
                "raise temperature, or leave num_samples out."
            )
        if 1 < self.beams < self.num_samples:
            raise ValueError(
                f"num_samples is {self.num_samples}, but beam search with {self.beams} beams ends "
                f"with {self.beams} texts; raise beams."
            )
        if "" in self.stop:
            raise ValueError("a stop string is empty; leave it out.")
        if self.stop and self.beams > 1:
            raise ValueError(
                "beam search ranks whole texts, which a stop string would cut; leave stop or beams "
                "out."
            )


class Completion(NamedTuple):
    """The text after a prompt, complete or not, and its score in beam search."""

    prompt: str
    stream: TextStream
    score: float | None = None


Completions = tuple[list[Completion], StreamBatch]


def generate(options: GenerateOptions, typed: Collection[str] = ()) -> None:
    """Write texts that continue prompts; a single one is printed token by token.

    Args:
        options: Of the command.
        typed: Names of the typed ones, which win over the settings of the model's folder.
    """
    prompts = read_prompts(options)
    model = prepared(load_model(options.ckpt_path), options.device, options.quantize)
    tokens = [prompt_tokens(model, prompt) for prompt in prompts]
    generation = model.generation()
    if generation:
        options = generation.apply_to(options, typed, max(map(len, tokens)))
    tokens = [truncate(model, ids, number, options) for number, ids in enumerate(tokens, 1)]
    start = time.perf_counter()
    complete = beam_completions if options.beams > 1 else sampled_completions
    rows, batch = complete(model, prompts, tokens, options, generation)
    for number, row in enumerate(rows):
        if options.json:
            print_json(row, batch, number % options.num_samples)
            continue
        if len(rows) > 1:
            print(f"{heading(number, options.num_samples, len(prompts)):-<80}")
        print_text(row, batch)
    if any(row.stream.ended == "context" for row in rows):
        print(
            f"texts ended with the context of {model.net.max_length} tokens, which beam search "
            "cannot go beyond",
            file=sys.stderr,
        )
    count = sum(row.stream.tokens for row in rows)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.1f} s ({count / seconds:.0f} tokens/s)", file=sys.stderr)


def sampled_completions(
    model: LanguageModel,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
    generation: FolderGeneration | None,
) -> Completions:
    """Starts `num_samples` texts for each prompt; sample i has the same seed for all prompts."""
    samples = range(options.num_samples)
    rows = [ids for ids in tokens for _ in samples]
    seeds = [options.seed + sample for _ in tokens for sample in samples]
    batch = stream_texts(model, rows, options, options.stop, seeds, generation)
    names = [prompt for prompt in prompts for _ in samples]
    return [Completion(*pair) for pair in zip(names, batch.streams, strict=True)], batch


def beam_completions(
    model: LanguageModel,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
    generation: FolderGeneration | None,
) -> Completions:
    """Generates the best `num_samples` texts of beam search for each prompt."""
    ends = end_tokens(model, generation)
    banned: Sequence[int] = ()
    renormalize = True
    if generation:
        banned = generation.banned
        renormalize = bool(generation.settings.renormalize_logits)
    texts = beam_search(model.net, tokens, options, ends, banned, renormalize)
    rows = []
    for prompt, ids, best in zip(prompts, tokens, texts, strict=True):
        for text, score in best[: options.num_samples]:
            stream = TextStream(model.tokenizer, ids, options.stop, ends)
            for token in text:
                stream.add(token)
            stream.finish("length" if len(text) == options.max_new_tokens else "context")
            rows.append(Completion(prompt, stream, score))
    return rows, StreamBatch([row.stream for row in rows], iter(()))


def read_prompts(options: GenerateOptions) -> list[str]:
    """Returns the prompts of the command line and the file; an empty one if there are none.

    Raises:
        UsageError: The file does not exist, holds no prompt, or is not UTF-8.
    """
    if options.prompt_file is None:
        return options.prompt or [""]
    lines = read_lines(options.prompt_file, "--prompt_file", "prompts")
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(
            f"--prompt_file {options.prompt_file} holds no prompt: write one on each line"
        )
    return options.prompt + prompts


def truncate(
    model: LanguageModel, tokens: list[int], number: int, options: GenerateOptions
) -> list[int]:
    """Returns as many last tokens of a prompt as fit into the context; says so if it cuts.

    Beam search does not go beyond the context, and keeps up to half of it for new tokens.

    Raises:
        UsageError: The prompt would be cut and the options are strict, or the text would be longer
            than the sliding window of the weights.
    """
    context = model.net.max_length
    window = model.net.config.sliding_window
    size = len(tokens) + options.max_new_tokens - 1  # the last one is not read
    if window is not None and size > window:
        raise UsageError(
            f"prompt {number} has {len(tokens)} tokens, and with --max_new_tokens "
            f"{options.max_new_tokens} the text is longer than the {window} tokens that the "
            "weights attend to (sliding_window): lower it, or shorten the prompt"
        )
    limit = context
    if options.beams > 1:
        limit = max(1, (context + 1) // 2, context + 1 - options.max_new_tokens)
    if len(tokens) <= limit:
        return tokens
    reason = f"prompt {number} has {len(tokens)} tokens, and the context of the model is {context}"
    if options.beams > 1:
        reason += f", {context - limit} of which beam search keeps for new ones"
    if options.strict:
        raise UsageError(f"{reason}: shorten it, or leave --strict out to read its last part")
    print(f"{reason}: its last {limit} are read", file=sys.stderr)
    return tokens[-limit:]


def heading(number: int, samples: int, prompts: int) -> str:
    """Returns the heading of text `number`, if there are several."""
    names = []
    if prompts > 1:
        names.append(f"prompt {number // samples + 1}")
    if samples > 1:
        names.append(f"sample {number % samples + 1}")
    return f"--- {', '.join(names)} "


def chunks(stream: TextStream, batch: StreamBatch) -> Iterator[str]:
    """Yields the text of one stream as it grows; the others of the batch grow with it."""
    size = 0
    while True:
        yield stream.text[size:]
        size = len(stream.text)
        if stream.ended:
            return
        batch.advance()


def print_text(row: Completion, batch: StreamBatch) -> None:
    """Prints prompt and text as it grows."""
    print(row.prompt, end="", flush=True)
    for chunk in chunks(row.stream, batch):
        print(chunk, end="", flush=True)
    print(flush=True)


def print_json(row: Completion, batch: StreamBatch, sample: int) -> None:
    """Prints an object once its text is complete."""
    text = "".join(chunks(row.stream, batch))
    entry: dict[str, Any] = {
        "prompt": row.prompt,
        "text": text,
        "sample": sample + 1,
        "tokens": row.stream.tokens,
        "ended": row.stream.ended,
    }
    if row.score is not None:
        entry["score"] = row.score
    print(json_line(entry), flush=True)
