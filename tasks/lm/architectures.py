"""Which decoder to build: presets by name, or what goes with pretrained weights; and loading those weights."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_lightning.utilities import rank_zero_only

from datamodules.tokenizers import Frame, Tokenizer, TokenizerConfig
from modules.models.gpt import DECODER_PRESETS, Decoder, DecoderConfig
from modules.pretrained.decoder import load_weights, to_tessera
from modules.pretrained.decoder_configs import config_from_huggingface
from tasks.checkpoints.generation_config import FolderGeneration, read_generation
from tasks.checkpoints.pretrained import (
    CKPT_PATH,
    OPTION,
    Settings,
    checkpoint_options,
    folder_options,
    folder_state,
    local_folder,
    pretrained_state,
    read_settings,
)
from tasks.checkpoints.reading import KEY, load_config, net_weights, read_checkpoint
from tasks.checkpoints.weights import State
from tasks.cli.config_files import Options
from tasks.cli.parsing import merged
from tasks.errors import UsageError, usage_errors
from tasks.text import with_vocabulary

TASKS = ("lm",)  # whose checkpoints hold a decoder
ROW = 256  # tokens of a row where nobody says how many


def presets() -> dict[str, Options]:
    """The named sizes as options; tokens and context come from the data."""
    return {
        name: asdict(replace(config, max_length=None)) for name, config in DECODER_PRESETS.items()
    }


def fitted(config: DecoderConfig, facts: Mapping[str, Any]) -> DecoderConfig:
    """The configuration for data with these facts: `vocabulary`, the number of tokens, and `max_length`, in tokens.

    The context is that of the data where it is not given, and grows to it where positions need no learning.

    Raises:
        UsageError: the tokenizer has more tokens than the network, or rows are longer than it has learned
            positions or a sliding window.
    """
    config = with_vocabulary(config, facts)
    length, window = facts["max_length"], config.sliding_window
    if window is not None and length > window:
        raise UsageError(
            f"--data.max_length {length} is more than the {window} tokens that the weights attend to "
            f"(sliding_window), and there is no attention within a window here: lower it to {window}"
        )
    return replace(config, max_length=max(config.max_length or 0, facts["max_length"]))


def pretrained_options(source: str) -> Options:
    """Network and tokenizer that go with pretrained weights, and rows for a short context; no dropout of checkpoints.

    Args:
        source: a checkpoint of `fit`, `hf/<model>`, or a local folder of Hugging Face's layout.

    Raises:
        UsageError: no such model, folder or checkpoint, or one that is not a decoder of ours.
        DataError: the hub cannot be reached.
    """
    if source.endswith(".ckpt"):
        options = checkpoint_options(source, TASKS)
    else:
        folder = local_folder(source)
        options = folder_options(folder, asdict(read_config(source, folder)))
        folder_state(folder, converted, meta=True)
    context = options["model"]["net"]["max_length"]
    return (
        merged(options, {"data": {"max_length": context}}) if context and context < ROW else options
    )


def read_config(source: str, folder: Path, option: str = OPTION) -> DecoderConfig:
    """Sizes of the model in a folder of Hugging Face's layout; says where its window makes the context shorter."""
    (_, config), positions = read_settings(
        folder,
        lambda settings: (
            config_from_huggingface(settings),
            settings.get("max_position_embeddings"),
        ),
        option,
    )
    if positions and config.max_length and positions > config.max_length:
        rank_zero_only(print)(
            f"{source}: its attention looks back {config.max_length} tokens, so that is the context, not {positions}"
        )
    return config


def load_pretrained(net: Decoder, source: str, facts: Mapping[str, Any]) -> None:
    """Load pretrained weights into `net`, all of them.

    Args:
        net: The network.
        source: As in `pretrained_options`.
        facts: Of the data, with their `tokenizer`.

    Raises:
        UsageError: the weights do not fit the network, or its tokenizer is another one.
    """
    state = pretrained_state(source, TASKS, facts, converted)
    with usage_errors(f"--model.pretrained {source}"):
        load_weights(net, state)


def converted(settings: Settings, weights: State) -> State:
    """Weights of Hugging Face under our names."""
    family, config = config_from_huggingface(settings)
    return to_tessera(family, weights, config)


class Model(NamedTuple):
    """A language model to use.

    Args:
        net: The network, in evaluation mode.
        tokenizer: Its tokenizer.
        facts: Of the data that it was trained on.
        folder: That it was published in; None: it is one of ours.
    """

    net: Decoder
    tokenizer: Tokenizer
    facts: dict[str, Any]
    folder: Path | None = None

    @property
    def frame(self) -> Frame:
        """Control tokens that it saw around documents."""
        return self.tokenizer.frame if self.facts["framed"] else Frame()

    def generation(self) -> FolderGeneration | None:
        """What its folder asks of generation.

        Raises:
            UsageError: The folder says it in a way that cannot be understood.
        """
        if self.folder is None:
            return None
        settings = read_settings(self.folder, dict, CKPT_PATH)
        forced = ("forced_bos_token_id", "forced_eos_token_id")
        return read_generation(self.folder, settings, self.net.vocabulary, forced)


def load_model(source: str) -> Model:
    """The language model of a checkpoint of `fit`, of `hf/<model>`, or of a folder of Hugging Face's layout.

    Raises:
        UsageError: there is no such model, or it is not a language model.
        RunError, DataError: it is damaged, or the hub cannot be reached.
    """
    if source.startswith("hf/") or Path(source).is_dir():
        return _published(source)
    checkpoint = read_checkpoint(source, "lm")
    saved = checkpoint[KEY]
    net = Decoder(load_config(DecoderConfig, saved["net"]))
    net.load_state_dict(net_weights(checkpoint))
    return Model(net.eval(), Tokenizer.from_json(saved["facts"]["tokenizer"]), saved["facts"])


def marks_documents(settings: Settings) -> bool:
    """Whether a model saw where documents begin or end: not if its `config.json` says that there are no such tokens."""
    return any(settings.get(f"{role}_token_id", 0) is not None for role in ("bos", "eos"))


def _published(source: str) -> Model:
    folder = local_folder(source, CKPT_PATH)
    config, tokenizer = read_config(source, folder, CKPT_PATH), Tokenizer.from_file(folder)
    begins = tokenizer.frame.head is not None
    with usage_errors(f"{CKPT_PATH} {source}"):
        if config.vocabulary is None or config.max_length is None:
            raise UsageError("its config.json does not say how many tokens it knows or reads")
        if tokenizer.size > config.vocabulary:
            raise UsageError(
                f"its tokenizer has {tokenizer.size} tokens, but its config.json {config.vocabulary}"
            )
        state = folder_state(folder, converted, CKPT_PATH)
        net = Decoder(config)
        load_weights(net, state)
    facts = {
        "tokenizer": tokenizer.to_json(),
        "tokenizer_options": asdict(TokenizerConfig(file=str(folder))),
        "vocabulary": tokenizer.size,
        "padding": 0,
        "max_length": config.max_length,
        "framed": begins or read_settings(folder, marks_documents, CKPT_PATH),
    }
    return Model(net.eval(), tokenizer, facts, folder)
