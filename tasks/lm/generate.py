"""`python -m tasks.lm generate`: texts that continue prompts."""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from datamodules.tokenizers import truncation
from modules.config import require
from modules.generation.beam_search import beam_search
from modules.generation.sampling import GenerationConfig
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.cli.text_io import json_line, print_note, printing_to, read_input_lines
from tasks.errors import UsageError
from tasks.inference import InferenceOptions, prepare_model
from tasks.lm.architectures import NOT_CAUSAL, LanguageModel, load_model
from tasks.lm.streaming import StreamBatch, TextStream, end_tokens, prompt_tokens, stream_texts
from tasks.tracking.report import format_count

MAX_SAMPLES = 10_000  # for each prompt, all generated at the same time


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationConfig, InferenceOptions):
    """Write texts that continue prompts.

    Args:
        prompt: Beginning of the text; may be given several times. Without any, the model begins a
            document of its own.
        input: File with a prompt on each line; - is standard input.
        output: File for what is printed; null: standard output.
        samples: Texts for each prompt; in beam search the best ones.
        seed: Seed of the first text of each prompt; that of its next text is 1 higher.
        stop: String that ends a text and is not part of it; may be given several times.
        json: Print one JSON object per line for each text, once it is complete: prompt, text,
            sample, number of new tokens, how it ended (length, end of the document, stop string,
            or, in beam search, context), and its score in beam search.
        strict: Refuse a prompt that does not fit into the context instead of reading its last part.
    """

    prompt: list[str] = field(default_factory=list)
    input: str | None = None
    output: str | None = None
    samples: int = 1
    stop: list[str] = field(default_factory=list)
    json: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sampling()
        samples = f"samples is {self.samples}"
        require(
            1 <= self.samples <= MAX_SAMPLES,
            f"{samples}; it must be from 1 to {MAX_SAMPLES:,}.",
        )
        require(
            self.samples == 1 or self.beams > 1 or self.temperature > 0,
            f"{samples}, but at temperature 0 all are the same text; raise temperature.",
        )
        require(
            self.beams == 1 or self.samples <= self.beams,
            f"{samples}, but {self.beams} beams end with {self.beams} texts; raise beams.",
        )
        require("" not in self.stop, "a stop string is empty; leave it out.")
        require(
            not self.stop or self.beams == 1, "stop is not for beam search; leave it or beams out."
        )


@dataclass(frozen=True)
class Completion:
    """The text after a prompt, which may still grow with others; `score` is of beam search.

    `number` is that of the prompt and `sample` that of the text after it, both from 1.
    """

    prompt: str
    number: int
    sample: int
    stream: TextStream
    batch: StreamBatch
    score: float | None = None

    def chunks(self) -> Iterator[str]:
        """Yields the text as it grows, to its end."""
        size = 0
        while True:
            yield self.stream.text[size:]
            size = len(self.stream.text)
            if self.stream.ended:
                return
            self.batch.advance()


def generate(options: GenerateOptions, on_command_line: Collection[str] = ()) -> None:
    """Write texts that continue prompts, token by token."""
    prompts = read_prompts(options)
    model = prepare_model(load_model(options.ckpt_path), options.device, options.quantize)
    tokens, options = read_by_model(model, prompts, options, on_command_line)
    start = time.perf_counter()
    with printing_to(options.output):
        found = completions(model, prompts, tokens, options)
        for completion in found:
            if options.json:
                print_completion_json(completion)
                continue
            names = [f"prompt {completion.number}"] if len(prompts) > 1 else []
            names += [f"sample {completion.sample}"] if options.samples > 1 else []
            if names:
                print(f"{'--- ' + ', '.join(names) + ' ':-<80}")
            print(completion.prompt, end="", flush=True)
            for chunk in completion.chunks():
                print(chunk, end="", flush=True)
            print(flush=True)
    if any(completion.stream.ended == "context" for completion in found):
        limit = f"the context of {model.net.max_length} tokens, the limit of beam search"
        print(f"texts ended at {limit}", file=sys.stderr)
    count = sum(completion.stream.tokens for completion in found)
    seconds = time.perf_counter() - start
    rate = f"{count / seconds:.0f} tokens/s"
    print(f"{format_count(count, 'token')} in {seconds:.1f} s ({rate})", file=sys.stderr)


def read_by_model(
    model: LanguageModel,
    prompts: Sequence[str],
    options: GenerateOptions,
    given: Collection[str],
    note: Callable[[str], None] = print_note,
) -> tuple[list[list[int]], GenerateOptions]:
    """Returns the tokens of each prompt, and options with the defaults of the model's folder.

    `given` and `note` are those of `FolderGeneration.apply_to`.
    """
    if not model.net.config.stack.causal:
        note(f"{NOT_CAUSAL}, and never learned to write: the text means nothing")
    tokens = [prompt_tokens(model, prompt) for prompt in prompts]
    generation = model.generation()
    if generation:
        options = generation.apply_to(options, given, max(map(len, tokens)), note)
    rows = [truncate(model, ids, number, options, note) for number, ids in enumerate(tokens, 1)]
    return rows, options


def completions(
    model: LanguageModel,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
) -> list[Completion]:
    """Starts the texts after all prompts."""
    start = beam_completions if options.beams > 1 else sampled_completions
    return start(model, prompts, tokens, options, model.generation())


def sampled_completions(
    model: LanguageModel,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
    generation: FolderGeneration | None,
) -> list[Completion]:
    """Starts `samples` texts for each prompt; sample i has the same seed for all prompts."""
    samples = range(options.samples)
    rows = [ids for ids in tokens for _ in samples]
    seeds = [options.seed + sample for _ in tokens for sample in samples]
    batch = stream_texts(model, rows, options, options.stop, seeds, generation)
    streams = iter(batch.streams)
    return [
        Completion(prompt, number, sample + 1, next(streams), batch)
        for number, prompt in enumerate(prompts, 1)
        for sample in samples
    ]


def beam_completions(
    model: LanguageModel,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
    generation: FolderGeneration | None,
) -> list[Completion]:
    """Generates the best `samples` texts of beam search for each prompt."""
    ends = end_tokens(model, generation)
    banned = generation.banned if generation else ()
    renormalize = generation is None or bool(generation.settings.renormalize_logits)
    found = beam_search(model.net, tokens, options, ends, banned, renormalize)
    completions = []
    for number, (prompt, ids, best) in enumerate(zip(prompts, tokens, found, strict=True), 1):
        for sample, (text, score) in enumerate(best[: options.samples], 1):
            stream = TextStream(model.tokenizer, ids, end_tokens=ends)
            for token in text:
                stream.add(token)
            stream.finish("length" if len(text) == options.max_new_tokens else "context")
            complete = StreamBatch([stream], iter(()))
            completions.append(Completion(prompt, number, sample, stream, complete, score))
    return completions


def read_prompts(options: GenerateOptions) -> list[str]:
    """Returns the prompts of the command line and the file; one empty prompt if there are none."""
    if options.input is None:
        return options.prompt or [""]
    lines = read_input_lines(options.input, "--input", "prompts")
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"--input {options.input} has no prompt: write one per line")
    return options.prompt + prompts


def truncate(
    model: LanguageModel,
    tokens: list[int],
    number: int,
    options: GenerateOptions,
    note: Callable[[str], None],
) -> list[int]:
    """Returns the last tokens of a prompt that fit into the context, with a note if it cuts.

    Beam search cannot exceed the context, and reserves up to half of it for new tokens.
    """
    context = model.net.max_length
    window = model.net.config.sliding_window
    size = len(tokens) + options.max_new_tokens - 1  # the last one is not read
    if window is not None and size > window:
        raise UsageError(
            f"prompt {number} has {len(tokens)} tokens, which with --max_new_tokens "
            f"{options.max_new_tokens} exceed the sliding_window of {window}: lower it, or "
            "shorten the prompt"
        )
    limit = context
    if options.beams > 1:
        limit = max(1, (context + 1) // 2, context + 1 - options.max_new_tokens)
    if len(tokens) <= limit:
        return tokens
    reason = f"prompt {number} has {len(tokens)} tokens, and the context of the model is {context}"
    if options.beams > 1:
        reason += f", {context - limit} of which beam search reserves for new ones"
    if options.strict:
        raise UsageError(f"{reason}: shorten it, or leave --strict out to read its last part")
    note(truncation(reason, limit, "tail"))
    return tokens[-limit:]


def print_completion_json(completion: Completion) -> None:
    """Prints an object once its text is complete."""
    text = "".join(completion.chunks())
    entry: dict[str, Any] = {
        "prompt": completion.prompt,
        "text": text,
        "sample": completion.sample,
        "tokens": completion.stream.tokens,
        "ended": completion.stream.ended,
    }
    if completion.score is not None:
        entry["score"] = completion.score
    print(json_line(entry), flush=True)
