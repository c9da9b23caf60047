"""`python -m tasks.lm generate`: texts that go on from prompts."""

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
from tasks.lm.architectures import Model, load_model
from tasks.lm.writing import Writer, Writers, end_tokens, prompt_tokens, writers
from tasks.training.devices import DeviceName, prepared

MOST_SAMPLES = 10_000  # for each prompt; memory is taken for all of them


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationConfig):
    """Write texts that go on from prompts.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout, whose
            generation_config.json then has the defaults.
        prompt: Beginning of the text; may be given several times. None at all: the beginning of a document.
        prompt_file: File with a prompt on each line; - is standard input.
        num_samples: Texts for each prompt, the first drawn with `seed`, the next with one more; in beam search the
            best ones.
        stop: String that ends a text and is no part of it; may be given several times.
        json: Print an object on a line for each text, when it is done: prompt, text, number of new tokens, how it ended
            (length, end of the document, stop string, or in beam search the context), and its score in beam search.
        strict: Refuse a prompt that is longer than the context, or than beam search has room for in it, instead of
            reading its last part only.
        quantize: int8: weights in a quarter of the bytes, on a CPU, a little less exact; null: as they are.
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
        if not 1 <= self.num_samples <= MOST_SAMPLES:
            raise ValueError(
                f"num_samples is {self.num_samples}; it must be from 1 to {MOST_SAMPLES:,}."
            )
        if self.temperature == 0 and self.beams == 1 < self.num_samples:
            raise ValueError(f"num_samples is {self.num_samples}, but at temperature 0 all are the same text; raise "
                             "temperature, or leave num_samples out.")  # fmt: skip
        if 1 < self.beams < self.num_samples:
            raise ValueError(f"num_samples is {self.num_samples}, but beam search with {self.beams} beams ends with "
                             f"{self.beams} texts; raise beams.")  # fmt: skip
        if "" in self.stop:
            raise ValueError("a stop string is empty; leave it out.")
        if self.stop and self.beams > 1:
            raise ValueError(
                "beam search ranks whole texts, which a stop string would cut; leave stop or beams out."
            )


class Done(NamedTuple):
    """A text that is written, or being written, and its score in beam search."""

    prompt: str
    writer: Writer
    score: float | None = None


def generate(options: GenerateOptions, typed: Collection[str] = ()) -> None:
    """Write texts that go on from prompts; with one, as its tokens are made.

    Args:
        options: Of the command.
        typed: Names of those that win over what the model's folder asks.
    """
    prompts = read_prompts(options)
    model = prepared(load_model(options.ckpt_path), options.device, options.quantize)
    tokens, found = [prompt_tokens(model, prompt) for prompt in prompts], model.generation()
    if found:
        options = found.followed(options, typed, max(map(len, tokens)))
    tokens = [fitting(model, ids, number, options) for number, ids in enumerate(tokens, 1)]
    start = time.perf_counter()
    rows, steps = (ranked if options.beams > 1 else drawn)(model, prompts, tokens, options, found)
    for number, row in enumerate(rows):
        if options.json:
            print_json(row, steps, number % options.num_samples)
        else:
            if len(rows) > 1:
                print(f"{heading(number, options.num_samples, len(prompts)):-<80}")
            print_text(row, steps)
    if any(row.writer.ended == "context" for row in rows):
        print(f"texts ended with the context of {model.net.max_length} tokens, which beam search cannot go beyond",
              file=sys.stderr)  # fmt: skip
    made, seconds = sum(row.writer.tokens for row in rows), time.perf_counter() - start
    print(f"{made} tokens in {seconds:.1f} s ({made / seconds:.0f} tokens/s)", file=sys.stderr)


Rows = tuple[list[Done], Writers]


def drawn(
    model: Model,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
    found: FolderGeneration | None,
) -> Rows:
    """`num_samples` texts for each prompt, all in one batch; sample i is drawn with the same seed for every prompt."""
    samples = range(options.num_samples)
    steps = writers(
        model,
        [ids for ids in tokens for _ in samples],
        options,
        options.stop,
        [options.seed + sample for _ in tokens for sample in samples],
        found,
    )
    names = [prompt for prompt in prompts for _ in samples]
    return [Done(name, row) for name, row in zip(names, steps.rows, strict=True)], steps


def ranked(
    model: Model,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
    found: FolderGeneration | None,
) -> Rows:
    """The best `num_samples` texts of beam search for each prompt."""
    rows, ends = [], end_tokens(model, found)
    banned, renormalize = (
        (found.banned, bool(found.asked.renormalize_logits)) if found else ((), True)
    )
    texts = beam_search(model.net, tokens, options, ends, banned, renormalize)
    for prompt, ids, best in zip(prompts, tokens, texts, strict=True):
        for text, score in best[: options.num_samples]:
            writer = Writer(model.tokenizer, ids, options.stop, ends)
            for token in text:
                writer.add(token)
            writer.finish("length" if len(text) == options.max_new_tokens else "context")
            rows.append(Done(prompt, writer, score))
    return rows, Writers([row.writer for row in rows], iter(()))


def read_prompts(options: GenerateOptions) -> list[str]:
    """The prompts of the command line and those of the file; one that is empty where there are none.

    Raises:
        UsageError: the file does not exist, holds no prompt, or is not UTF-8.
    """
    if options.prompt_file is None:
        return options.prompt or [""]
    lines = read_lines(options.prompt_file, "--prompt_file", "prompts")
    if not (found := [line for line in lines if line.strip()]):
        raise UsageError(
            f"--prompt_file {options.prompt_file} holds no prompt: write one on each line"
        )
    return options.prompt + found


def fitting(model: Model, tokens: list[int], number: int, options: GenerateOptions) -> list[int]:
    """The last tokens of a prompt, as many as the context has room for; says so where some are left out.

    Beam search does not go beyond the context, of which it keeps up to a half for new tokens.

    Raises:
        UsageError: some would be left out, and the options are strict; or the text would be longer than
            the sliding window of the weights.
    """
    context, window = model.net.max_length, model.net.config.sliding_window
    size = len(tokens) + options.max_new_tokens - 1  # the last one is not read
    if window is not None and size > window:
        raise UsageError(
            f"prompt {number} has {len(tokens)} tokens, and with --max_new_tokens {options.max_new_tokens} the "
            f"text is longer than the {window} tokens that the weights attend to (sliding_window): lower it, or "
            "shorten the prompt"
        )
    most = (
        context
        if options.beams == 1
        else max(1, (context + 1) // 2, context + 1 - options.max_new_tokens)
    )
    if len(tokens) <= most:
        return tokens
    what = f"prompt {number} has {len(tokens)} tokens, and the context of the model is {context}"
    if options.beams > 1:
        what += f", {context - most} of which beam search keeps for new ones"
    if options.strict:
        raise UsageError(f"{what}: shorten it, or leave --strict out to read its last part")
    print(f"{what}: its last {most} are read", file=sys.stderr)
    return tokens[-most:]


def heading(number: int, samples: int, prompts: int) -> str:
    """What to call text `number` where there are several."""
    names = [f"prompt {number // samples + 1}"] if prompts > 1 else []
    names += [f"sample {number % samples + 1}"] if samples > 1 else []
    return f"--- {', '.join(names)} "


def growing(writer: Writer, steps: Writers) -> Iterator[str]:
    """The text of one row as it comes, while those after it are written, too."""
    size = 0
    while True:
        yield writer.text[size:]
        size = len(writer.text)
        if writer.ended:
            return
        steps.advance()


def print_text(row: Done, steps: Writers) -> None:
    """Print prompt and text as it comes."""
    print(row.prompt, end="", flush=True)
    for part in growing(row.writer, steps):
        print(part, end="", flush=True)
    print(flush=True)


def print_json(row: Done, steps: Writers, sample: int) -> None:
    """Print one object, when its text is done."""
    text = "".join(growing(row.writer, steps))
    found: dict[str, Any] = {
        "prompt": row.prompt,
        "text": text,
        "sample": sample + 1,
        "tokens": row.writer.tokens,
    }
    found |= {"ended": row.writer.ended} | ({} if row.score is None else {"score": row.score})
    print(json_line(found), flush=True)
