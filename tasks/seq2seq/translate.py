"""`python -m tasks.seq2seq translate`: translate sentences."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from datamodules.sources.parallel import ParallelOptions, sources_in_table
from datamodules.tokenizers import truncation
from datamodules.utils.progress import progress_bar
from modules.config import require
from modules.generation.sampling import GenerationConfig, StoppingName
from modules.generation.translation import Translation
from modules.generation.translation import translate as search
from modules.schema import from_dict
from tasks.checkpoints.reading import checkpoint_errors
from tasks.cli.text_io import format_output, json_line, print_note, printing_to, read_input_lines
from tasks.errors import UsageError
from tasks.inference import InferenceOptions, prepare_model, prepare_net
from tasks.seq2seq.architectures import TranslationModel, load_ensemble
from tasks.tracking.report import format_count


@dataclass(frozen=True, kw_only=True)
class TranslateOptions(GenerationConfig, InferenceOptions):
    """Translate texts, one sentence per line, in their order; empty lines stay empty.

    Args:
        text: Sentence to translate; may be given several times.
        input: File with one sentence per line, or a table (.csv, .tsv, .jsonl, .parquet) with one
            in each row; - is standard input, which is also read if there is neither a file nor a
            text.
        output: File for what is printed; null: standard output.
        beams: Beams of beam search; 1: greedy decoding, or sampling with a temperature.
        max_new_tokens: Largest number of tokens of a translation, up to what the model can
            generate.
        temperature: Temperature of sampling, which needs 1 beam; 0: no sampling.
        early_stopping: When beam search ends for a sentence. "likely" (False in transformers): when
            no unfinished translation would rank among the best if it ended now. "never": when none
            can rank among them any more, often at the length limit. "first" (True): when as many
            are finished as there are beams.
        seed: Seed of sampling for the first sentence; that of each next sentence is 1 higher.
        nbest: Translations of each sentence, best first. Above 1, a line has three columns with
            tabs between them: number of the sentence, score (log-probability, normalised by the
            length; higher is better), translation.
        batch_size: Sentences at a time, sorted by length.
        source_column: Column of a table with the sentences; null: as in training, or the name of
            the source language.
        header: Whether the first line of a CSV or TSV file names the columns, else they are called
            1, 2, ...; null: as in training.
        ensemble: Checkpoint of another model with the same tokenizers, such as one of another seed;
            may be given several times. The probabilities of all are averaged; special tokens and
            defaults are those of `ckpt_path`.
        json: Print one JSON object per line for each translation: line, source, translation, rank,
            score, number of tokens, and whether it is finished; without it, [...] marks an
            unfinished one.
    """

    text: list[str] = field(default_factory=list)
    input: str | None = None
    output: str | None = None
    beams: int = 5
    max_new_tokens: int = 512
    temperature: float = 0.0
    early_stopping: StoppingName = "likely"
    nbest: int = 1
    batch_size: int = 32
    source_column: str | None = None
    header: bool | None = None
    ensemble: list[str] = field(default_factory=list)
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sampling()
        require(self.nbest >= 1, f"nbest is {self.nbest}; it must be at least 1.")
        require(self.batch_size >= 1, f"batch_size is {self.batch_size}; it must be at least 1.")
        several = " and ".join(name for name in ("beams", "nbest") if getattr(self, name) > 1)
        require(
            self.temperature == 0 or not several,
            f"temperature is {self.temperature}, but sampling gives one text; set {several} to 1.",
        )
        require(
            self.nbest <= self.beams,
            f"nbest is {self.nbest}, with only {self.beams} beams; raise beams.",
        )
        require(
            not self.ensemble or self.repetition_penalty == 1,
            "repetition_penalty changes the scores of one model; leave it or ensemble out.",
        )


def translate(options: TranslateOptions, on_command_line: Collection[str] = ()) -> None:
    """Translate texts, a sentence a line."""
    model = load_ensemble(options.ckpt_path, options.ensemble)
    lines = read_sentences(options, model)
    model = prepare_model(model, options.device, options.quantize)
    for net in model.others:
        prepare_net(net, options.device, options.quantize)
    options = with_folder_defaults(model, options, on_command_line)
    start = time.perf_counter()
    with printing_to(options.output):
        found = [best[: options.nbest] for best in translations(model, lines, options)]
        seconds = time.perf_counter() - start
        for number, (line, best) in enumerate(zip(lines, found, strict=True), 1):
            for rank, translation in enumerate(best, 1):
                text = model.tokenizer.decode(translation.tokens)
                if options.json:
                    print_translation_json(number, line, rank, translation, text)
                elif options.nbest == 1:
                    print(format_output(text, translation.finished))
                else:
                    text = format_output(text, translation.finished)
                    print(f"{number}\t{translation.score:.4f}\t{text}")
    print(
        f"{format_count(len(lines), 'sentence')} in {seconds:.1f} s ({len(lines) / seconds:.1f}/s)",
        file=sys.stderr,
    )
    if not lines:
        print("there was nothing to translate: the input is empty", file=sys.stderr)
    unfinished = sum(not translation.finished for best in found for translation in best)
    if unfinished:
        longest = model.max_length
        advice = "raise --max_new_tokens"
        if options.max_new_tokens >= longest:
            advice = f"the model generates at most {longest} tokens"
        verb = "was" if unfinished == 1 else "were"
        what = f"{format_count(unfinished, 'translation')} {verb} not finished"
        print(f"{what}: {advice}", file=sys.stderr)


def read_sentences(options: TranslateOptions, model: TranslationModel) -> list[str]:
    """Returns the texts of the command line, and those of the file or standard input."""
    given = {"source_column": options.source_column, "header": options.header}
    given = {name: value for name, value in given.items() if value is not None}
    found = None
    if options.input not in (None, "-") and not Path(str(options.input)).exists():
        raise UsageError(
            f"--input {options.input} does not exist: give a file of sentences, or a table"
        )
    if options.input is not None:
        names = [field.name for field in fields(ParallelOptions)]
        saved = {name: value for name, value in (model.dataset or {}).items() if name in names}
        saved |= given
        with checkpoint_errors(f"checkpoint '{options.ckpt_path}'"):
            dataset = from_dict(ParallelOptions, saved, "data.dataset.")
        language = (model.metadata["languages"] or ["source"])[0]
        found = sources_in_table(options.input, language, dataset)
    if found is None and given:
        raise UsageError(
            f"--{' and --'.join(given)}: for tables only, and --input is not a table: leave it out"
        )
    if found is None and (options.input is not None or not options.text):
        found = read_input_lines(options.input or "-", "--input", "sentences")
    return options.text + (found or [])


def with_folder_defaults(
    model: TranslationModel,
    options: TranslateOptions,
    given: Collection[str],
    note: Callable[[str], None] = print_note,
) -> TranslateOptions:
    """Returns options with the defaults of the model's folder, if it has some.

    `given` and `note` are those of `FolderGeneration.apply_to`.
    """
    if model.generation is None:
        return options
    return model.generation.apply_to(options, given, 1, note)  # the prompt is the start token


def translations(
    model: TranslationModel,
    lines: Sequence[str],
    options: TranslateOptions,
    note: Callable[[str], None] = print_note,
    progress: bool = True,
) -> list[list[Translation]]:
    """Returns the translations of each line, best first; an empty line has an empty one.

    `note` tells the user that lines were truncated; `progress` shows a bar.
    """
    found = [[Translation([], 0.0, True)] for _ in lines]
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    texts = [lines[number] for number in numbers]
    rows, cut = model.tokenizer.encode_sources(texts, model.max_length)
    if any(cut):
        what = f"{sum(cut)} of {len(lines)} sentences"
        kept = model.tokenizer.source.truncation
        note(truncation(what, model.max_length, kept))
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    with progress_bar("translating", len(rows) if progress else 0, least=100) as advance:
        for first in range(0, len(order), options.batch_size):
            batch = order[first : first + options.batch_size]
            sources = [rows[index] for index in batch]
            seeds = [options.seed + numbers[index] for index in batch]
            translated = search(model.nets, sources, options, **model.tokens, seeds=seeds)
            for index, best in zip(batch, translated, strict=True):
                found[numbers[index]] = best
            advance(len(batch))
    return found


def print_translation_json(
    line: int, source: str, rank: int, translation: Translation, text: str
) -> None:
    entry = {
        "line": line,
        "source": source,
        "translation": text,
        "rank": rank,
        "score": translation.score,
        "tokens": len(translation.tokens),
        "finished": translation.finished,
    }
    print(json_line(entry))
