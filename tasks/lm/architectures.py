"""Which decoder to build: sizes that fit the data, and pretrained weights."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_lightning.utilities import rank_zero_only

from datamodules.tokenizers import BoundaryTokens, Tokenizer, TokenizerConfig
from modules.models.gpt import Decoder, DecoderConfig
from modules.pretrained.decoder import FAMILIES
from modules.pretrained.weights import load_weights
from tasks.checkpoints.generation_config import FolderGeneration, read_generation
from tasks.checkpoints.pretrained import (
    CKPT_PATH,
    ModelFolder,
    checkpoint_options,
    find_checkpoint,
    model_options,
    pretrained_weights,
)
from tasks.checkpoints.reading import (
    KEY,
    Checkpoint,
    load_network,
    read_checkpoint,
)
from tasks.checkpoints.weights import load_pretrained_weights
from tasks.cli.text_io import print_note
from tasks.errors import UsageError, usage_errors
from tasks.options import Options, merge_options
from tasks.text import fill_vocabulary

TASKS = ("lm",)  # whose checkpoints hold a decoder
DEFAULT_LENGTH = 256  # of --data.max_length
NOT_CAUSAL = (
    "the decoder has no causal mask (--model.net.stack.causal false), so it sees the token that it "
    "must predict"
)


def fit_to_data(config: DecoderConfig, metadata: Mapping[str, Any]) -> DecoderConfig:
    """Returns a config with the vocabulary and at least the `max_length` of the data, in tokens."""
    config = fill_vocabulary(config, metadata)
    outputs = config.output_vocabulary
    if outputs is not None and outputs < metadata["vocabulary"]:
        raise UsageError(
            f"--model.net.output_vocabulary {outputs} is less than the vocabulary of the tokenizer "
            f"({metadata['vocabulary']} tokens): leave it out"
        )
    length = metadata["max_length"]
    window = config.sliding_window
    if window is not None and length > window:
        raise UsageError(
            f"--data.max_length {length} exceeds the sliding_window of the weights, {window} "
            f"tokens, and there is no attention within a window here: lower it to {window}"
        )
    return replace(config, max_length=max(config.max_length or 0, length))


def pretrained_options(source: str) -> Options:
    """Returns the network and the tokenizer of `--model.pretrained SOURCE` as options.

    A context that is shorter than the default rows of data also shortens the rows.
    """
    if source.endswith(".ckpt"):
        options = checkpoint_options(source, TASKS)
    else:
        folder = ModelFolder(source, FAMILIES)
        note_window(folder, print)
        options = model_options(folder.path, asdict(folder.config))
    context = options["model"]["net"]["max_length"]
    if context and context < DEFAULT_LENGTH:
        return merge_options(options, {"data": {"max_length": context}})
    return options


def note_window(folder: ModelFolder, say: Callable[[str], None]) -> None:
    """Says if the window of a model of Hugging Face makes the context shorter."""
    context = folder.config.max_length
    positions = folder.settings.get("max_position_embeddings") or 0
    if positions > context:
        rank_zero_only(say)(
            f"{folder.source}: its context is its sliding_window of {context} tokens, "
            f"not {positions}"
        )


def load_pretrained(config: DecoderConfig, source: str, metadata: Mapping[str, Any]) -> Decoder:
    """Builds a decoder with pretrained weights; refuses those of another size or tokenizer."""
    state = pretrained_weights(source, TASKS, metadata, FAMILIES)
    net = Decoder(config)
    load_pretrained_weights(net, source, state)
    return net


class LanguageModel(NamedTuple):
    """A language model in evaluation mode; `folder` is None if it is a checkpoint of ours."""

    net: Decoder
    tokenizer: Tokenizer
    metadata: dict[str, Any]
    folder: ModelFolder | None = None

    @property
    def boundary_tokens(self) -> BoundaryTokens:
        """Special tokens around documents in its training data, if they were marked."""
        return (
            self.tokenizer.boundary_tokens if self.metadata["marks_documents"] else BoundaryTokens()
        )

    def generation(self) -> FolderGeneration | None:
        """Returns the generation settings of its folder, if it has one."""
        if self.folder is None:
            return None
        unsupported = ("forced_bos_token_id", "forced_eos_token_id")
        return read_generation(
            self.folder.path, self.folder.settings, self.net.vocabulary, ignored=unsupported
        )


def load_model(source: str) -> LanguageModel:
    """Loads a language model: a checkpoint of `fit`, `hf/<model>` of the hub, or a local folder."""
    source = find_checkpoint(source)
    if source.startswith("hf/") or Path(source).is_dir():
        return load_folder(ModelFolder(source, FAMILIES, CKPT_PATH))
    return from_checkpoint(read_checkpoint(source, "lm"))


def from_checkpoint(checkpoint: Checkpoint) -> LanguageModel:
    """Returns the language model of a checkpoint of `fit`."""
    metadata = checkpoint[KEY]["metadata"]
    net = load_network(checkpoint, DecoderConfig, Decoder)
    return LanguageModel(net, Tokenizer.from_json(metadata["tokenizer"]), metadata)


def load_folder(folder: ModelFolder) -> LanguageModel:
    """Loads a model of Hugging Face."""
    note_window(folder, print_note)
    tokenizer = Tokenizer.from_file(folder.path)
    with usage_errors(f"{folder.option} {folder.source}"):
        if tokenizer.vocab_size > (folder.config.vocabulary or 0):
            raise UsageError(
                f"its tokenizer has {tokenizer.vocab_size} tokens, its config.json fewer: "
                "give files of one model"
            )
        net = Decoder(folder.config)
        load_weights(net, folder.weights())
    # A config.json that has null for both says that the model saw neither.
    ends = [folder.settings.get(f"{role}_token_id", 0) for role in ("bos", "eos")]
    metadata = {
        "tokenizer": tokenizer.to_json(),
        "tokenizer_options": asdict(TokenizerConfig(file=str(folder.path))),
        "vocabulary": tokenizer.vocab_size,
        "pad_id": 0,
        "max_length": folder.config.max_length,
        "marks_documents": ends != [None, None] or tokenizer.boundary_tokens.bos is not None,
    }
    return LanguageModel(net.eval(), tokenizer, metadata, folder)
