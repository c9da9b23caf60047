"""Which encoder-decoder to build or load: sizes that fit the data, pretrained weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.tokenizers import PairTokenizer, PairTokenizerConfig, Tokenizer, stored_truncation
from datamodules.utils.files import read_object
from modules.models.seq2seq import ARCHITECTURES, Seq2Seq, Seq2SeqConfig
from modules.pretrained.seq2seq import FAMILIES
from modules.pretrained.weights import load_weights
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.checkpoints.pretrained import (
    CKPT_PATH,
    ModelFolder,
    check_tokenizer,
    find_checkpoint,
    read_task_checkpoint,
    tokenizer_file,
    without_dropout,
)
from tasks.checkpoints.reading import (
    KEY,
    Checkpoint,
    load_network,
    net_weights,
    read_checkpoint,
)
from tasks.checkpoints.weights import load_pretrained_weights
from tasks.errors import UsageError, usage_errors
from tasks.options import Options
from tasks.seq2seq.decoding import DecodingTokens, decoder_start, decoding_tokens, folder_generation
from tasks.text import fill_vocabulary

TASKS = ("seq2seq",)  # whose checkpoints hold an encoder-decoder
SIDES = ("source", "target")
FORMAT_OPTIONS = ("start", "begin", "prompt")  # tokens around the texts, as in training
SENTENCEPIECE = "spiece.model"  # T5's tokenizer if there is no tokenizer.json
TARGET_FOLDER = "target_tokenizer"  # of an export with two tokenizers


def fit_to_data(config: Seq2SeqConfig, metadata: Mapping[str, Any]) -> Seq2SeqConfig:
    """Returns a config with the vocabularies and at least the `max_length` (tokens) of the data."""
    config = fill_vocabulary(config, metadata, "source_vocabulary")
    config = fill_vocabulary(config, metadata, "target_vocabulary")
    tokenizer = PairTokenizer.from_metadata(metadata)
    same = tokenizer.source.vocab == tokenizer.target.vocab
    if config.tying in ("all", "inputs") and not same:
        raise UsageError(
            f"--model.net.tying {config.tying} shares one table between two tokenizers: set it to "
            "target, or use one tokenizer for both (--data.tokenizer.joint true)"
        )
    return replace(config, max_length=max(config.max_length or 0, metadata["max_length"]))


def build_seq2seq(config: Seq2SeqConfig) -> Seq2Seq:
    """Builds the network of a config whose sizes are filled in."""
    return ARCHITECTURES[config.architecture](config)


def pretrained_options(source: str) -> Options:
    """Returns the network and the tokenizers of `--model.pretrained SOURCE` as options."""
    if source.endswith(".ckpt"):
        saved = read_task_checkpoint(source, TASKS)[KEY]
        metadata = saved["metadata"]
        net = without_dropout(saved["net"])
        paths = [tokenizer_file(source, metadata[f"{side}_tokenizer"]) for side in SIDES]
        tokenizer = {name: metadata["tokenizer_options"][name] for name in FORMAT_OPTIONS}
        tokenizer |= file_options(*paths)
    else:
        folder = ModelFolder(source, FAMILIES)
        tokenizer_config = folder_tokenizers(folder)
        net = asdict(folder.config)
        names = ("file", "target_file", *FORMAT_OPTIONS)
        tokenizer = {name: getattr(tokenizer_config, name) for name in names}
    return {"model": {"net": net}, "data": {"tokenizer": tokenizer}}


def file_options(source: Path, target: Path) -> Options:
    return {"file": str(source), "target_file": None if target == source else str(target)}


def folder_tokenizers(model: ModelFolder) -> PairTokenizerConfig:
    folder = model.path
    # Older files of BART and T5 do not name the start token.
    default = "eos_token_id" if model.family == "bart" else "pad_token_id"
    start = decoder_start(folder, model.settings, model.settings.get(default))
    begin = False
    if (folder / "source.spm").is_file():
        files = file_options(folder / "source.spm", folder / "target.spm")
    elif (folder / SENTENCEPIECE).is_file() and not (folder / "tokenizer.json").is_file():
        files = file_options(folder / SENTENCEPIECE, folder / SENTENCEPIECE)
    else:
        has_target = (folder / TARGET_FOLDER).is_dir()
        files = file_options(folder, folder / TARGET_FOLDER if has_target else folder)
        begin = adds_bos(Tokenizer.from_file(folder))
    kept = stored_truncation(folder)
    return PairTokenizerConfig(**files, start=start, begin=begin, truncate=kept)


def adds_bos(tokenizer: Tokenizer) -> bool:
    """Tells whether a tokenizer's file puts [BOS] before a text."""
    from tokenizers import Tokenizer as Backend

    content = json.loads(tokenizer.to_json())
    content.pop("special_tokens", None)  # our entry, which the tokenizers library does not know
    ids = Backend.from_str(json.dumps(content)).encode("").ids
    return bool(ids[:1] == [tokenizer.special_ids.bos])


def load_pretrained(config: Seq2SeqConfig, source: str, metadata: Mapping[str, Any]) -> Seq2Seq:
    """Builds a network with pretrained weights; refuses those of another size or tokenizer."""
    if source.endswith(".ckpt"):
        checkpoint = read_task_checkpoint(source, TASKS)
        languages = checkpoint[KEY]["metadata"]["languages"] or []
        theirs = PairTokenizer.from_metadata(checkpoint[KEY]["metadata"])
        state = net_weights(checkpoint)
    else:
        folder = ModelFolder(source, FAMILIES)
        languages = read_languages(folder.path)
        theirs = PairTokenizer.load_or_train(list, list, folder_tokenizers(folder))  # loads
        state = folder.weights()
    own = metadata["languages"] or []
    if is_reversed(languages, own) and theirs.source.digest != theirs.target.digest:
        raise UsageError(
            f"--model.pretrained {source} translates {'-'.join(languages)}, and its tokenizers are "
            f"for these languages in this order, but --data.languages is {'-'.join(own)}: give "
            "weights of this direction, or train from scratch"
        )
    for side in SIDES:
        check_tokenizer(source, getattr(theirs, side), metadata[f"{side}_tokenizer"])
    net = build_seq2seq(config)
    load_pretrained_weights(net, source, state)
    return net


def read_languages(folder: Path) -> list[str]:
    """Returns the languages of a Marian model, such as [en, de]; [] if its files do not say."""
    file = folder / "tokenizer_config.json"
    try:
        settings = read_object(file) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({error}): download the model again") from error
    pair = settings.get("source_lang"), settings.get("target_lang")
    names = [name for name in pair if isinstance(name, str)]
    return names if len(names) == 2 else []


class TranslationModel(NamedTuple):
    """A translation model in evaluation mode.

    `generation` are settings of its folder, if any; `dataset` the options `--data.dataset` of its
    training; `others` the networks whose probabilities are averaged with those of `net`.
    """

    net: Seq2Seq
    tokenizer: PairTokenizer
    metadata: dict[str, Any]
    tokens: DecodingTokens
    generation: FolderGeneration | None = None
    dataset: dict[str, Any] | None = None
    others: tuple[Seq2Seq, ...] = ()

    @property
    def nets(self) -> tuple[Seq2Seq, ...]:
        """All networks of the ensemble."""
        return (self.net, *self.others)

    @property
    def max_length(self) -> int:
        """Tokens that all networks can read and generate."""
        return min(net.max_length for net in self.nets)

    @classmethod
    def of(
        cls, net: Seq2Seq, metadata: dict[str, Any], generation: FolderGeneration | None = None
    ) -> "TranslationModel":
        """Returns a network with the tokenizers of its metadata, and the settings of its folder."""
        tokenizer = PairTokenizer.from_metadata(metadata)
        tokens = decoding_tokens(tokenizer, generation)
        return cls(net.eval(), tokenizer, metadata, tokens, generation)


def load_model(source: str, option: str = CKPT_PATH) -> TranslationModel:
    """Loads a checkpoint of `fit`, `hf/<model>`, or a folder of Hugging Face's layout.

    `option` is the one that names it, for errors.
    """
    source = find_checkpoint(source, option)
    if source.startswith("hf/") or Path(source).is_dir():
        return load_folder(ModelFolder(source, FAMILIES, option))
    return from_checkpoint(read_checkpoint(source, "seq2seq"))


def load_ensemble(ckpt_path: str, others: Sequence[str]) -> TranslationModel:
    """Loads a model, and the networks of others that read and write the same tokens.

    Raises `UsageError` if one of them does not.
    """
    model = load_model(ckpt_path)
    own = tokens_of_texts(model)
    languages = model.metadata["languages"] or []
    nets = []
    for source in others:
        other = load_model(source, "--ensemble")
        differences = [name for name, value in tokens_of_texts(other).items() if value != own[name]]
        if is_reversed(languages, other.metadata["languages"] or []):
            differences.append("direction")
        if differences:
            raise UsageError(
                f"--ensemble {source}: not the same {', '.join(differences)} as of {ckpt_path}: "
                "give models that were trained with the same --data.languages, --data.tokenizer "
                "and --model.net.target_vocabulary"
            )
        nets.append(other.net)
    return model._replace(others=tuple(nets))


def tokens_of_texts(model: TranslationModel) -> dict[str, Any]:
    """What decides on the tokens that a model reads and writes, by name."""
    pair = model.tokenizer
    return {
        "source tokens": pair.source.vocab,
        "target tokens": pair.target.vocab,
        "size of the target vocabulary": model.net.vocabulary,
        "prompt": pair.config.prompt,
        "tokens that begin a text": (pair.config.begin, model.tokens["start"]),
        "tokens that end a text": sorted(model.tokens["stop"]),
    }


def is_reversed(languages: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two models translate between the same two languages in opposite directions."""
    return [*languages] == [*reversed(others)] and [*languages] != [*others]


def from_checkpoint(checkpoint: Checkpoint) -> TranslationModel:
    """Returns the translation model of a checkpoint of `fit`."""
    net = load_network(checkpoint, Seq2SeqConfig, build_seq2seq)
    model = TranslationModel.of(net, checkpoint[KEY]["metadata"])
    return model._replace(dataset=checkpoint[KEY]["config"]["data"].get("dataset"))


def load_folder(folder: ModelFolder) -> TranslationModel:
    """Loads a model of Hugging Face."""
    tokenizer_config = folder_tokenizers(folder)
    metadata = {
        **PairTokenizer.load_or_train(list, list, tokenizer_config).metadata(),
        "tokenizer_options": asdict(tokenizer_config),
        "max_length": folder.config.max_length,
        "languages": read_languages(folder.path),
    }
    weights = folder.weights()
    with usage_errors(folder.source):
        net = build_seq2seq(fit_to_data(folder.config, metadata))
        load_weights(net, weights)
    generation = folder_generation(folder.path, folder.settings, net.vocabulary)
    return TranslationModel.of(net, metadata, generation)
