"""`python -m tasks.lm generate`: texts that continue prompts."""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from modules.config import require
from modules.generation.beam_search import beam_search
from modules.generation.quantized import QuantizationName
from modules.generation.sampling import GenerationConfig
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.cli.text_io import json_line, read_lines
from tasks.errors import UsageError
from tasks.lm.architectures import LanguageModel, load_model
from tasks.lm.streaming import StreamBatch, TextStream, end_tokens, prompt_tokens, stream_texts
from tasks.training.devices import DeviceName, prepared

MAX_SAMPLES = 10_000  # for each prompt, all generated at the same time


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationConfig):
    """Write texts that continue prompts.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout,
            whose generation_config.json then has the defaults.
        prompt: Beginning of the text; may be given several times. Without any, a document begins.
        prompt_file: File with a prompt on each line; - is standard input.
        num_samples: Texts for each prompt: the first with `seed`, the next with `seed` + 1, ...; in
            beam search the best ones.
        stop: String that ends a text and is not part of it; may be given several times.
        json: Print one JSON object per line for each text, once it is complete: prompt, text,
            sample, number of new tokens, how it ended (length, end of the document, stop string,
            or, in beam search, context), and its score in beam search.
        strict: Refuse a prompt that does not fit into the context instead of reading its last part.
        quantize: int8: weights in a quarter of the memory, on a CPU, slightly less exact; null: as
            they are.
        device: Where to compute; auto: on a GPU if there is one, but int8 on the CPU.
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
        samples = f"num_samples is {self.num_samples}"
        require(
            1 <= self.num_samples <= MAX_SAMPLES,
            f"{samples}; it must be from 1 to {MAX_SAMPLES:,}.",
        )
        require(
            self.num_samples == 1 or self.beams > 1 or self.temperature > 0,
            f"{samples}, but at temperature 0 all are the same text; raise temperature, or leave "
            "num_samples out.",
        )
        require(
            self.beams == 1 or self.num_samples <= self.beams,
            f"{samples}, but {self.beams} beams end with {self.beams} texts; raise beams.",
        )
        require("" not in self.stop, "a stop string is empty; leave it out.")
        require(
            not self.stop or self.beams == 1,
            "beam search ranks whole texts, which a stop string would cut; leave stop or beams "
            "out.",
        )


@dataclass(frozen=True)
class Completion:
    """The text after a prompt, which may still grow.

    Args:
        prompt: The prompt.
        stream: The text.
        batch: All texts that grow together with this one.
        score: In beam search.
    """

    prompt: str
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


def generate(options: GenerateOptions, typed: Collection[str] = ()) -> None:
    """Write texts that continue prompts; a single one is printed token by token.

    Args:
        options: Of the command.
        typed: Names of those on the command line, which override the settings of the model's
            folder.
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
    completions = complete(model, prompts, tokens, options, generation)
    for number, completion in enumerate(completions):
        sample = number % options.num_samples + 1
        if options.json:
            print_json(completion, sample)
            continue
        names = [f"prompt {number // options.num_samples + 1}"] if len(prompts) > 1 else []
        names += [f"sample {sample}"] if options.num_samples > 1 else []
        if names:
            print(f"{'--- ' + ', '.join(names) + ' ':-<80}")
        print_text(completion)
    if any(completion.stream.ended == "context" for completion in completions):
        print(
            f"texts ended at the context of {model.net.max_length} tokens, the limit of beam "
            "search",
            file=sys.stderr,
        )
    count = sum(completion.stream.tokens for completion in completions)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.1f} s ({count / seconds:.0f} tokens/s)", file=sys.stderr)


def sampled_completions(
    model: LanguageModel,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
    generation: FolderGeneration | None,
) -> list[Completion]:
    """Starts `num_samples` texts for each prompt; sample i has the same seed for all prompts."""
    samples = range(options.num_samples)
    rows = [ids for ids in tokens for _ in samples]
    seeds = [options.seed + sample for _ in tokens for sample in samples]
    batch = stream_texts(model, rows, options, options.stop, seeds, generation)
    names = [prompt for prompt in prompts for _ in samples]
    return [
        Completion(name, stream, batch) for name, stream in zip(names, batch.streams, strict=True)
    ]


def beam_completions(
    model: LanguageModel,
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    options: GenerateOptions,
    generation: FolderGeneration | None,
) -> list[Completion]:
    """Generates the best `num_samples` texts of beam search for each prompt."""
    ends = end_tokens(model, generation)
    banned = generation.banned if generation else ()
    renormalize = generation is None or bool(generation.settings.renormalize_logits)
    found = beam_search(model.net, tokens, options, ends, banned, renormalize)
    completions = []
    for prompt, ids, best in zip(prompts, tokens, found, strict=True):
        for text, score in best[: options.num_samples]:
            stream = TextStream(model.tokenizer, ids, end_tokens=ends)
            for token in text:
                stream.add(token)
            stream.finish("length" if len(text) == options.max_new_tokens else "context")
            complete = StreamBatch([stream], iter(()))
            completions.append(Completion(prompt, stream, complete, score))
    return completions


def read_prompts(options: GenerateOptions) -> list[str]:
    """Returns the prompts of the command line and the file; one empty prompt if there are none."""
    if options.prompt_file is None:
        return options.prompt or [""]
    lines = read_lines(options.prompt_file, "--prompt_file", "prompts")
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UsageError(f"--prompt_file {options.prompt_file} has no prompt: write one per line")
    return options.prompt + prompts


def truncate(
    model: LanguageModel, tokens: list[int], number: int, options: GenerateOptions
) -> list[int]:
    """Returns the last tokens of a prompt that fit into the context; prints a note if it cuts.

    Beam search cannot exceed the context, and reserves up to half of it for new tokens.

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
            f"{options.max_new_tokens} the text exceeds the sliding_window of the weights, "
            f"{window} tokens: lower --max_new_tokens, or shorten the prompt"
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
    print(f"{reason}: its last {limit} are read", file=sys.stderr)
    return tokens[-limit:]


def print_text(completion: Completion) -> None:
    """Prints prompt and text as it grows."""
    print(completion.prompt, end="", flush=True)
    for chunk in completion.chunks():
        print(chunk, end="", flush=True)
    print(flush=True)


def print_json(completion: Completion, sample: int) -> None:
    """Prints an object once its text is complete."""
    text = "".join(completion.chunks())
    entry: dict[str, Any] = {
        "prompt": completion.prompt,
        "text": text,
        "sample": sample,
        "tokens": completion.stream.tokens,
        "ended": completion.stream.ended,
    }
    if completion.score is not None:
        entry["score"] = completion.score
    print(json_line(entry), flush=True)
