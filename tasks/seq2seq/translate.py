"""`python -m tasks.seq2seq translate`: translations of sentences."""

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from datamodules.utils.progress import progress_bar
from modules.config import require
from modules.generation.quantized import QuantizationName
from modules.generation.sampling import GenerationConfig, StoppingName
from modules.generation.translation import Translation
from modules.generation.translation import translate as search
from tasks.cli.text_io import UNFINISHED, json_line, printed, read_lines
from tasks.seq2seq.translator import TranslationModel, load_model
from tasks.training.devices import DeviceName, prepared


@dataclass(frozen=True, kw_only=True)
class TranslateOptions(GenerationConfig):
    """Translate texts, a sentence a line; the output is in their order, empty lines stay.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout,
            whose generation_config.json then has the defaults.
        text: Sentence to translate; may be given several times.
        file: File with a sentence on each line; - is standard input, which is also read where there
            is no text.
        beams: Beams of beam search; 1: greedy decoding, or sampling with a temperature.
        max_new_tokens: Tokens of a translation at most, up to what the model can generate.
        temperature: Of sampling, with 1 beam; 0: no sampling.
        early_stopping: When beam search for a sentence is over: "likely" when no open translation
            would be among the best if it ended at once; "never" before none can still be, by which
            many go up to the limit; "first" as soon as there are as many as beams.
        seed: Of sampling for the first sentence, one more for the next.
        nbest: Translations of each sentence, best first: a line for each, with the sentence's
            number and the score.
        batch_size: Sentences at a time, of like length.
        json: Print an object on a line for each translation: line, source, translation, rank,
            score, number of tokens, and whether it is finished, instead of a mark, [...], behind
            one that is not.
        quantize: int8: weights in a quarter of the bytes, on a CPU, a little less exact; null: as
            they are.
        device: Where to compute; auto: on a GPU if there is one.
    """

    ckpt_path: str
    text: list[str] = field(default_factory=list)
    file: str | None = None
    beams: int = 5
    max_new_tokens: int = 512
    temperature: float = 0.0
    early_stopping: StoppingName = "likely"
    nbest: int = 1
    batch_size: int = 32
    json: bool = False
    quantize: QuantizationName | None = None
    device: DeviceName = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("nbest", "batch_size"):
            require(
                getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1."
            )
        require(
            self.temperature == 0 or self.beams == self.nbest == 1,
            f"temperature is {self.temperature}, which samples one translation of each sentence, "
            "and beam search samples none; set beams and nbest to 1, or leave temperature out.",
        )
        require(
            self.nbest <= self.beams,
            f"nbest is {self.nbest}, but beam search with {self.beams} beams ends with "
            f"{self.beams} translations; raise beams.",
        )
        require(
            self.temperature > 0 or (self.top_k, self.top_p, self.min_p) == (None, None, None),
            "top_k, top_p and min_p say what to sample from; give a temperature, such as 1, or "
            "leave them out.",
        )


def translate(options: TranslateOptions, typed: Collection[str] = ()) -> None:
    """Translate texts, a sentence a line.

    Args:
        options: What to translate, and how.
        typed: Names of the typed ones, which win over the settings of the model's folder.
    """
    lines = list(options.text)
    if options.file is not None or not lines:
        lines += read_lines(options.file or "-", "--file", "sentences")
    model = prepared(load_model(options.ckpt_path), options.device, options.quantize)
    if model.generation:
        options = model.generation.apply_to(options, typed, prompt_length=1)  # the start token
    start = time.perf_counter()
    found = translations(model, lines, options)
    seconds = time.perf_counter() - start
    for number, (line, best) in enumerate(zip(lines, found, strict=True), 1):
        for rank, one in enumerate(best[: options.nbest], 1):
            text = model.tokenizer.decode(one.tokens)
            if options.json:
                print_json(number, line, rank, one, text)
            else:
                text = printed(text, one.finished)
                print(text if options.nbest == 1 else f"{number}\t{one.score:.4f}\t{text}")
    print(
        f"{len(lines)} sentences in {seconds:.1f} s ({len(lines) / seconds:.1f}/s)", file=sys.stderr
    )
    if not lines:
        print("there was nothing to translate: the input is empty", file=sys.stderr)
    cut = sum(not one.finished for best in found for one in best[: options.nbest])
    if cut:
        hint = f"they end with{UNFINISHED}"
        if options.json:
            hint = "raise --max_new_tokens if the model can generate more"
        print(f"{cut} translations were not finished at the length limit: {hint}", file=sys.stderr)


def translations(
    model: TranslationModel, lines: Sequence[str], options: TranslateOptions
) -> list[list[Translation]]:
    """Returns the translations of each line, best first; empty lines have empty ones."""
    found = [[Translation([], 0.0, True)] for _ in lines]
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    rows, cut = model.tokenizer.encode_sources(
        [lines[number] for number in numbers], model.net.max_length
    )
    if any(cut):
        print(
            f"{sum(cut)} of {len(lines)} sentences are longer than the {model.net.max_length} "
            "tokens that the model reads, and are translated without the rest",
            file=sys.stderr,
        )
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    with progress_bar("translating", len(rows), least=100) as advance:
        for first in range(0, len(order), options.batch_size):
            chosen = order[first : first + options.batch_size]
            sources = [rows[index] for index in chosen]
            seeds = [options.seed + numbers[index] for index in chosen]
            made = search(model.net, sources, options, **model.tokens, seeds=seeds)
            for index, best in zip(chosen, made, strict=True):
                found[numbers[index]] = best
            advance(len(chosen))
    return found


def print_json(line: int, source: str, rank: int, found: Translation, text: str) -> None:
    """Prints one translation as an object."""
    entry: dict[str, Any] = {"line": line, "source": source, "translation": text, "rank": rank}
    entry |= {"score": found.score, "tokens": len(found.tokens), "finished": found.finished}
    print(json_line(entry))
