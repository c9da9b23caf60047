"""Generation settings of a Hugging Face folder: `generation_config.json` or `config.json`."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from datamodules.utils.files import read_object, write_text
from modules.generation.sampling import GenerationConfig
from modules.schema import format_value, from_dict
from tasks.cli.text_io import print_note
from tasks.errors import UsageError, usage_errors

FILE = "generation_config.json"
DEFAULT_TOP_K = 50  # of transformers, with do_sample
EARLY_STOPPING = {True: "first", False: "likely", "never": "never"}  # theirs -> ours
FILTERS = ("top_k", "top_p", "min_p")
SAMPLING = ("temperature", *FILTERS)
THEIR_NAMES = {"beams": "num_beams", "stop": "stop_strings"}  # ours -> theirs
THEIR_NAMES |= dict.fromkeys(("samples", "nbest"), "num_return_sequences")
# Options that beam search lacks; if one is given, the folder's beams do not count.
NOT_IN_BEAM_SEARCH = (*SAMPLING, "repetition_penalty", "seed", "stop")
# Entries that change what is generated and are not supported, with the value that changes nothing.
LENGTHS = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens")
CUTOFFS = ("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha")
FACTORS = ("encoder_repetition_penalty", "typical_p", "guidance_scale", "num_beam_groups")
LISTS = ("begin_suppress_tokens", "sequence_bias", "force_words_ids", "constraints")
OTHERS = ("exponential_decay_length_penalty", "watermarking_config", "dola_layers", "max_time")
UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(LENGTHS + CUTOFFS, 0),
    **dict.fromkeys(FACTORS, 1),
    **dict.fromkeys(LISTS, []),
    **dict.fromkeys((*OTHERS, "top_h"), None),
    **dict.fromkeys(("remove_invalid_values", "token_healing"), False),
}
GenerationConfigType = TypeVar("GenerationConfigType", bound=GenerationConfig)


@dataclass(frozen=True)
class GenerationSettings:
    """Supported entries, by their names in `generate` of transformers; null: not given."""

    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    forced_bos_token_id: int | list[int] | None = None
    forced_eos_token_id: int | list[int] | None = None
    bad_words_ids: list[list[int]] | None = None
    suppress_tokens: list[int] | None = None
    renormalize_logits: bool | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    num_return_sequences: int | None = None
    stop_strings: str | list[str] | None = None


@dataclass(frozen=True)
class FolderGeneration:
    """Generation settings of a folder.

    Args:
        file: Where they are from.
        settings: Supported entries.
        unsupported: Other entries that would change what is generated, such as "min_length 5".
        vocabulary: Number of tokens of the model.
    """

    file: Path
    settings: GenerationSettings
    unsupported: tuple[str, ...]
    vocabulary: int

    @property
    def stop(self) -> tuple[int, ...]:
        return self.tokens("eos_token_id")

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that are never generated; raises `UsageError` if phrases of several are banned."""
        phrases = self.settings.bad_words_ids or []
        if any(len(phrase) != 1 for phrase in phrases):
            raise UsageError(
                f"{self.file}: bad_words_ids bans phrases of several tokens: remove them"
            )
        words = [token for (token,) in phrases if token not in self.stop]
        return (*self.check_tokens("bad_words_ids", words), *self.tokens("suppress_tokens"))

    def tokens(self, name: str) -> tuple[int, ...]:
        """Returns the tokens of an entry: one, several, or none."""
        value = getattr(self.settings, name)
        if value is None:
            return ()
        return self.check_tokens(name, [value] if isinstance(value, int) else value)

    def check_tokens(self, name: str, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens of an entry; raises `UsageError` if the model lacks one."""
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise UsageError(
                    f"{self.file}: {name} has token {format_value(token)}, but the model "
                    f"{self.vocabulary}: correct it"
                )
        return tuple(tokens)

    def apply_to(
        self,
        options: GenerationConfigType,
        given: Collection[str],
        prompt_length: int,
        note: Callable[[str], None] = print_note,
    ) -> GenerationConfigType:
        """Returns options with the folder's settings where none are given.

        Args:
            options: Of a command.
            given: Names of the options that a user gave, such as top_k or --top_k.
            prompt_length: Tokens of the longest prompt.
            note: Tells the user which settings are ignored.

        Raises:
            UsageError: A setting is out of range, or contradicts a given option.
        """
        known = {field.name for field in fields(options)}
        not_given = known - {name.removeprefix("--") for name in given}
        found = self.as_options(prompt_length)
        ignored = [*self.unsupported]
        samples = bool(self.settings.do_sample)
        if "nbest" in known and "samples" in found:  # the name in `translate`
            found["nbest"] = found.pop("samples")
        if not samples and options.temperature == 0:  # the default of `translate`
            found.pop("temperature", None)
        temperature = options.temperature
        if "temperature" in not_given:
            temperature = found.get("temperature", temperature)
        if temperature == 0:
            no_change = [*FILTERS]
            if "temperature" not in not_given and found.get("beams", options.beams) == 1:
                no_change += ["samples", "nbest"]  # all would be the same text
            found = {name: value for name, value in found.items() if name not in no_change}
        if samples and found.get("beams", 1) > 1:
            ignored.append(f"num_beams {found.pop('beams')} with do_sample true")
        ignored += [describe_entry(name, found[name]) for name in found if name not in known]
        found = {name: value for name, value in found.items() if name in not_given}
        if any(getattr(options, name) for name in known - not_given if name in NOT_IN_BEAM_SEARCH):
            found.pop("beams", None)
        if found.get("beams", options.beams) > 1:
            if samples:
                ignored.append("do_sample true in beam search")
            for name in ("repetition_penalty", "stop"):
                if name in found:
                    ignored.append(f"{describe_entry(name, found[name])} in beam search")
            found = {name: value for name, value in found.items() if name not in NOT_IN_BEAM_SEARCH}
        if ignored:
            listed = ", ".join(ignored)
            note(f"{self.file} asks for {listed}, which is not supported")
        with usage_errors(str(self.file)):
            return replace(options, **found)

    def as_options(self, prompt_length: int) -> dict[str, Any]:
        """Returns the settings as options of the commands, without those that change nothing."""
        settings = self.settings
        names = (*SAMPLING, "max_new_tokens", "repetition_penalty", "length_penalty")
        found = {name: getattr(settings, name) for name in names}
        found |= {"beams": settings.num_beams, "samples": settings.num_return_sequences}
        if settings.max_new_tokens is None and settings.max_length is not None:
            found["max_new_tokens"] = max(1, settings.max_length - prompt_length)
        if settings.do_sample:
            defaults = {"temperature": 1.0, "top_k": DEFAULT_TOP_K}
            found |= {name: value for name, value in defaults.items() if found[name] is None}
        elif settings.do_sample is False:
            found |= {**dict.fromkeys(SAMPLING), "temperature": 0.0}
        if (settings.num_beams or 1) > 1 or settings.early_stopping is not None:
            found["early_stopping"] = EARLY_STOPPING[settings.early_stopping or False]
        found["top_k"] = found["top_k"] or None  # 0 means none, too
        strings = settings.stop_strings
        found["stop"] = [strings] if isinstance(strings, str) else strings
        no_change = {"repetition_penalty": 1.0, "samples": 1}
        return {
            name: value
            for name, value in found.items()
            if value is not None and value != no_change.get(name)
        }


def write_generation(
    folder: Path, source: FolderGeneration | None, defaults: Mapping[str, Any]
) -> None:
    """Writes the generation settings of an exported model.

    Args:
        folder: The folder to write into.
        source: Settings of the folder that the model was read from, which are kept. Of a
            `generation_config.json` those that are not supported here are kept, too. None: the
            model is a checkpoint of ours.
        defaults: Entries that `source` may lack, by their names in `generate` of transformers. To
            a `generation_config.json` only ids of special tokens are added.
    """
    given: Mapping[str, Any] = {}
    if source is not None and source.file.name == FILE:
        defaults = {name: defaults[name] for name in defaults if name.endswith("_token_id")}
        given = read_object(source.file)
    elif source is not None:
        settings = asdict(source.settings)
        given = {name: value for name, value in settings.items() if value is not None}
    if "max_length" in given:  # the default of max_new_tokens would override it
        defaults = {name: defaults[name] for name in defaults if name != "max_new_tokens"}
    write_text(folder / FILE, json.dumps({**defaults, **given}, indent=2))


def describe_entry(name: str, value: Any) -> str:
    """An entry of the file in a message: its name there, and its value unless that is a list."""
    shown = "" if isinstance(value, list | dict) else f" {format_value(value)}"
    return f"{THEIR_NAMES.get(name, name)}{shown}"


def read_generation(
    folder: Path,
    config: Mapping[str, Any],
    vocabulary: int = 0,
    ignored: Sequence[str] = (),
    **defaults: Any,
) -> FolderGeneration:
    """Reads the generation settings of a folder of Hugging Face's layout.

    Args:
        folder: The folder.
        config: Its `config.json`, which is used if there is no `generation_config.json`.
        vocabulary: Number of tokens of the model.
        ignored: Entries of `GenerationSettings` that the task does not support.
        defaults: Entries that an older `config.json` leaves out.

    Raises:
        UsageError: An entry is of a wrong type, or the file cannot be read.
    """
    file = folder / FILE
    content: Mapping[str, Any] = {**defaults, **config}
    if file.exists():
        try:
            content = read_object(file)
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} is not readable: write it again, or remove it") from error
    else:
        file = folder / "config.json"
    known = {field.name for field in fields(GenerationSettings)}
    with usage_errors(str(file)):
        settings = from_dict(
            GenerationSettings, {name: content[name] for name in content if name in known}
        )
    no_change = {**UNSUPPORTED, **dict.fromkeys(ignored)}
    unsupported = tuple(
        describe_entry(name, content[name])
        for name, value in no_change.items()
        if content.get(name) not in (value, None)
    )
    return FolderGeneration(file, settings, unsupported, vocabulary)
