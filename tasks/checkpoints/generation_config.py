"""What a folder of Hugging Face's layout asks of generation, in `generation_config.json` or an older `config.json`."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from datamodules.utils.files import read_object
from modules.generation.sampling import GenerationConfig
from modules.schema import from_dict, shown
from tasks.errors import UsageError, usage_errors

FILE = "generation_config.json"
TOP_K = 50  # of `generate` where a folder asks for draws and does not say from how many tokens
EARLY_STOPPING = {True: "first", False: "likely", "never": "never"}  # theirs: ours
DRAWS = ("temperature", "top_k", "top_p", "min_p")  # which beam search knows nothing of
NO_BEAMS = (
    *DRAWS,
    "repetition_penalty",
    "seed",
    "stop",
)  # typed ones leave the beams of a folder out
Typed = TypeVar("Typed", bound=GenerationConfig)


@dataclass(frozen=True)
class Asked:
    """Entries that decide on texts, by their names in `generate` of transformers; null: nothing is asked."""

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

    def numbers(self, name: str) -> tuple[int, ...]:
        """The tokens of an entry: one, several, or none."""
        value = getattr(self, name)
        return () if value is None else (value,) if isinstance(value, int) else tuple(value)


# What else changes texts, which nothing here does, and where it changes nothing.
NOT_DONE: dict[str, Any] = {
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0
    ),
    **dict.fromkeys(
        ("encoder_repetition_penalty", "typical_p", "guidance_scale", "num_beam_groups"), 1
    ),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), 0),
    **dict.fromkeys(
        ("begin_suppress_tokens", "sequence_bias", "force_words_ids", "constraints"), []
    ),
    **dict.fromkeys(
        ("exponential_decay_length_penalty", "watermarking_config", "dola_layers", "max_time"), None
    ),
    **dict.fromkeys(("remove_invalid_values", "token_healing"), False),
    "top_h": None,
}


@dataclass(frozen=True)
class FolderGeneration:
    """What a folder asks of generation.

    Args:
        file: That says so.
        asked: What it asks.
        left: What it asks for that is not done here, in words.
        vocabulary: Number of tokens of the model.
    """

    file: Path
    asked: Asked
    left: tuple[str, ...]
    vocabulary: int

    @property
    def stop(self) -> tuple[int, ...]:
        """End tokens; none where it does not say."""
        return self.tokens("eos_token_id")

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that never follow.

        Raises:
            UsageError: It bans phrases of several tokens, or tokens that the model does not have.
        """
        phrases = self.asked.bad_words_ids or []
        if any(len(phrase) != 1 for phrase in phrases):
            raise UsageError(
                f"{self.file} bans phrases of several tokens (bad_words_ids), which is not supported: drop them"
            )
        words = tuple(token for (token,) in phrases if token not in self.stop)
        return (*self._known("bad_words_ids", words), *self.tokens("suppress_tokens"))

    def tokens(self, name: str) -> tuple[int, ...]:
        """Those of an entry.

        Raises:
            UsageError: The model does not have one of them.
        """
        return self._known(name, self.asked.numbers(name))

    def _known(self, name: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if strange := [token for token in tokens if not 0 <= token < self.vocabulary]:
            raise UsageError(
                f"{self.file}: {name} names token {shown(strange[0])}, but the model has {self.vocabulary}: correct it"
            )
        return tokens

    def followed(self, options: Typed, typed: Collection[str], read: int) -> Typed:
        """Options with what the folder asks in place of those that nobody typed; says what is not done.

        Args:
            options: Of a command.
            typed: Names of the options on its command line, such as --top_k.
            read: Number of tokens of the longest text that is gone on from.

        Raises:
            UsageError: It asks for a number that is out of range, or that what was typed does not go with.
        """
        known = {field.name for field in fields(options)}
        free = known - {name.removeprefix("--") for name in typed}
        found, left = self._options(read), [*self.left]
        if "nbest" in known and "num_samples" in found:  # of another command, another name
            found["nbest"] = found.pop("num_samples")
        if not self.asked.do_sample and options.temperature == 0:
            found = {name: value for name, value in found.items() if name not in DRAWS}
        if self.asked.do_sample and found.get("beams", 1) > 1:
            left.append(f"num_beams {found.pop('beams')} with do_sample true")
        left += [f"{name} {shown(found[name])}" for name in found if name not in known]
        found = {name: value for name, value in found.items() if name in free}
        if any(name in known - free and getattr(options, name) for name in NO_BEAMS):
            found.pop("beams", None)
        if found.get("beams", options.beams) > 1:
            left += ["do_sample true in beam search"] if self.asked.do_sample else []
            left += [
                f"{name} {shown(found[name])} in beam search"
                for name in ("repetition_penalty", "stop")
                if name in found
            ]
            found = {name: value for name, value in found.items() if name not in NO_BEAMS}
        if left:
            print(
                f"{self.file} asks for {', '.join(left)}, which is not done here", file=sys.stderr
            )
        with usage_errors(str(self.file)):
            return replace(options, **found)

    def _options(self, read: int) -> dict[str, Any]:
        """What it asks, as options of the commands."""
        asked = self.asked
        found = {
            name: getattr(asked, name) for name in (*DRAWS, "repetition_penalty", "length_penalty")
        }
        found |= {"beams": asked.num_beams, "num_samples": asked.num_return_sequences}
        found["max_new_tokens"] = asked.max_new_tokens
        if asked.max_new_tokens is None and asked.max_length is not None:
            found["max_new_tokens"] = max(1, asked.max_length - read)
        if asked.do_sample:
            found["temperature"] = 1.0 if asked.temperature is None else asked.temperature
            found["top_k"] = TOP_K if asked.top_k is None else asked.top_k
        elif asked.do_sample is False:
            found |= {**dict.fromkeys(DRAWS), "temperature": 0.0}
        if (asked.num_beams or 1) > 1 or asked.early_stopping is not None:
            found["early_stopping"] = EARLY_STOPPING[asked.early_stopping or False]
        found["top_k"] = found["top_k"] or None  # 0 is none, too
        strings = asked.stop_strings
        found["stop"] = [strings] if isinstance(strings, str) else strings
        usual = {"repetition_penalty": 1.0, "num_samples": 1}
        return {
            name: value
            for name, value in found.items()
            if value is not None and value != usual.get(name)
        }


def read_generation(
    folder: Path,
    settings: Mapping[str, Any],
    vocabulary: int = 0,
    ignored: Sequence[str] = (),
    **usual: Any,
) -> FolderGeneration:
    """What a folder asks of generation.

    Args:
        folder: Of Hugging Face's layout.
        settings: Content of its `config.json`, which counts where there is no `generation_config.json`.
        vocabulary: Number of tokens of the model.
        ignored: Entries of `Asked` that the task does not do.
        usual: Entries that an older `config.json` leaves out.

    Raises:
        UsageError: An entry is of a wrong type, or the file cannot be read.
    """
    file, content = folder / FILE, {**usual, **settings}
    if file.exists():
        try:
            content = read_object(file)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{file} is not readable: fetch or write it again, or leave it out"
            ) from error
    else:
        file = folder / "config.json"
    known = {field.name for field in fields(Asked)}
    with usage_errors(str(file)):
        asked = from_dict(Asked, {name: value for name, value in content.items() if name in known})
    nothing = {**NOT_DONE, **dict.fromkeys(ignored)}
    left = [
        f"{name} {shown(content[name])}"
        for name, none in nothing.items()
        if content.get(name) not in (none, None)
    ]
    return FolderGeneration(file, asked, tuple(left), vocabulary)
