"""Weights that a model of texts goes on from, and the tokenizer that comes with them: checkpoints, folders, the hub."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from datamodules.tokenizers import Tokenizer
from datamodules.utils.cache import cache_folder, content_key, unwritable
from datamodules.utils.files import read_object, replacing
from modules.schema import checked
from tasks.checkpoints.reading import KEY, Checkpoint, net_weights, read_checkpoint
from tasks.checkpoints.weights import State, read_weights, with_classes
from tasks.cli.parsing import Options
from tasks.errors import DataError, UsageError, usage_errors

FILES = (
    *("config.json", "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "model.safetensors",
        "model.safetensors.index.json",
        "model-*.safetensors",
    ),  # whole, or in parts
    *("vocab.txt", "vocab.json", "merges.txt"),  # of tokenizers from before tokenizer.json
    *("source.spm", "target.spm", "target_vocab.json", "spiece.model"),  # Marian's, T5's
)
# Fetched where there are no others.
OLDER = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-*.bin",
)
# Each run chooses these for itself: what suits pretraining on much text overfits few labels.
RATES = (
    "dropout",
    "mlp_dropout",
    "attention_dropout",
    "drop_path",
    "head_dropout",
    "pooler_dropout",
    "token_dropout",
)
OPTION = "--model.pretrained"  # which names such weights to train on
CKPT_PATH = "--ckpt_path"  # which names a model to use
BEST = Path("checkpoints", "best.ckpt")  # in the folder of a run
Settings = dict[str, Any]  # content of a config.json
Made = TypeVar("Made")


def checkpoint_options(source: str, tasks: Sequence[str], **anew: Any) -> Options:
    """The network and the tokenizer of a checkpoint, as options; it decides on no rates of dropout.

    Args:
        source: A checkpoint of `fit`.
        tasks: Those whose networks will do.
        anew: Options of the network that the new data decide, with the value that leaves them open.

    Raises:
        UsageError: There is no such checkpoint, or it is of another task.
    """
    saved = checkpoint_of(source, tasks)[KEY]
    return folder_options(
        tokenizer_file(source, saved["facts"]), without_rates({**saved["net"], **anew})
    )


def folder_options(tokenizer: Path, net: Options) -> Options:
    """A network and its tokenizer, a file or a folder with one, as options."""
    return {"model": {"net": net}, "data": {"tokenizer": {"file": str(tokenizer)}}}


def without_rates(net: Options) -> Options:
    """Options of a network without the rates of dropout, for which a preset, a config or the defaults then stand."""
    nested = {name: without_rates(value) for name, value in net.items() if isinstance(value, dict)}
    return {name: value for name, value in {**net, **nested}.items() if name not in RATES}


def pretrained_state(
    source: str,
    tasks: Sequence[str],
    facts: Mapping[str, Any],
    convert: Callable[[Settings, State], State],
) -> State:
    """The weights of `source` under our names, the rows of a classifier as the data's classes, see `with_classes`.

    Args:
        source: A checkpoint of `fit`, `hf/<model>`, or a local folder of Hugging Face's layout.
        tasks: Those whose networks will do.
        facts: Of the data, with their `tokenizer`, and `class_names` where they have classes.
        convert: Gives weights of Hugging Face, with the content of their `config.json`, our names.

    Raises:
        UsageError: The tokenizer of the data is another one, or there are no such weights.
    """
    if source.endswith(".ckpt"):
        checkpoint = checkpoint_of(source, tasks)
        same_tokenizer(source, Tokenizer.from_json(checkpoint[KEY]["facts"]["tokenizer"]), facts)
        names = checkpoint[KEY]["facts"].get("class_names")
        return with_classes(source, net_weights(checkpoint), names, facts.get("class_names"))
    folder = local_folder(source)
    same_tokenizer(source, Tokenizer.from_file(folder), facts)
    names = read_settings(folder, class_names)
    return with_classes(source, folder_state(folder, convert), names, facts.get("class_names"))


def class_names(settings: Settings) -> list[str] | None:
    """Names of a classifier's classes in the order of its rows, by `id2label`; None where it does not name each.

    Raises:
        ValueError: `id2label` is no dict of names.
    """
    usual = {"0": "LABEL_0", "1": "LABEL_1"}  # which transformers leaves out of the file
    names = checked(dict[str, str], settings.get("id2label") or usual, "id2label")
    rows = [str(row) for row in range(len(names))]
    return [names[row] for row in rows] if names.keys() == set(rows) else None


def folder_state(
    folder: Path,
    convert: Callable[[Settings, State], State],
    option: str = OPTION,
    meta: bool = False,
) -> State:
    """The weights in a folder of Hugging Face's layout under our names.

    Args:
        folder: The folder.
        convert: As in `pretrained_state`.
        option: What named the folder.
        meta: Only see whether names and shapes fit the `config.json`.
    """
    weights: State = {}
    for file in weight_files(folder):
        weights |= read_weights(str(file), option, meta)
    return read_settings(folder, lambda settings: convert(settings, weights), option)


def checkpoint_of(source: str, tasks: Sequence[str]) -> Checkpoint:
    """The checkpoint, if it is of one of these tasks."""
    checkpoint = read_checkpoint(source)
    if (task := checkpoint[KEY]["task"]) not in tasks:
        raise UsageError(
            f"--model.pretrained {source} is of task '{task}': give one of {' or '.join(tasks)}"
        )
    return checkpoint


def same_tokenizer(source: str, theirs: Tokenizer, facts: Mapping[str, Any]) -> None:
    """Refuse data whose tokenizer cuts texts otherwise than the one that the weights were trained with."""
    own = Tokenizer.from_json(facts["tokenizer"])
    if (
        own.digest != theirs.digest
    ):  # not their texts: another version of the package may write the same otherwise
        raise UsageError(
            f"the tokenizer of the data ({own.size} tokens) is not that of {source} ({theirs.size} tokens): leave "
            "--data.tokenizer out, it comes with the weights"
        )


def tokenizer_file(source: str, facts: Mapping[str, Any]) -> Path:
    """A file with the tokenizer of a checkpoint: the run folder's own, else one in the cache.

    Raises:
        DataError: The cache cannot be written.
    """
    beside = Path(source).resolve().parent.parent / "tokenizer.json"
    if beside.is_file() and beside.read_bytes() == facts["tokenizer"].encode():
        return beside
    path = cache_folder("tokenizers") / f"{content_key(facts['tokenizer'])}.tokenizer.json"
    try:
        with replacing(path) as partial:
            partial.write_bytes(facts["tokenizer"].encode())
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def read_settings(
    folder: Path, understand: Callable[[Settings], Made], option: str = OPTION
) -> Made:
    """What `understand` makes of a folder's `config.json`; `option` is what named the folder.

    Raises:
        UsageError: There is none, or it describes a model that is not known here.
    """
    try:
        settings = read_object(folder / "config.json")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{folder} has no readable config.json ({reason}): give a folder of Hugging Face's layout"
        ) from error
    with usage_errors(f"{option} {folder / 'config.json'}"):
        return understand(settings)


def local_folder(source: str, option: str = OPTION) -> Path:
    """The folder with the model's files, downloaded where it is on the hub.

    Args:
        source: `hf/<model>`, or a local folder.
        option: What named it, for errors.

    Raises:
        UsageError: no such folder, or none with weights.
        DataError: it could not be downloaded.
    """
    if source.startswith("hf/"):
        folder = downloaded(source.removeprefix("hf/"), option)
    elif Path(source).is_dir():
        folder = Path(source).resolve()
    else:
        raise UsageError(
            f"{option} {source}: no such folder; give a checkpoint (.ckpt), a folder with config.json, "
            "model.safetensors and tokenizer.json, or hf/<model>"
        )
    if weight_files(folder):
        return folder
    if (folder / BEST).is_file():
        raise UsageError(
            f"{option} {source} is the folder of a run: give its checkpoint, {Path(source) / BEST}"
        )
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{option} {source} holds no model: give a checkpoint (.ckpt) or a folder with config.json, "
            "model.safetensors and tokenizer.json"
        )
    raise UsageError(
        f"{option} {source} has neither model.safetensors nor pytorch_model.bin: choose a model that has, or write "
        "this one anew with save_pretrained(FOLDER) of transformers and give that FOLDER"
    )


def weight_files(folder: Path) -> list[Path]:
    """The files of safetensors in a folder, else of PyTorch: one, or those that the index names.

    Raises:
        DataError: One of those is missing.
    """
    kinds = (
        (folder / name, folder / f"{name}.index.json")
        for name in ("model.safetensors", "pytorch_model.bin")
    )
    whole, index = next(
        (kind for kind in kinds if kind[0].is_file() or kind[1].is_file()), (None, None)
    )
    if whole is None or index is None:
        return []
    if whole.is_file():
        return [whole]
    try:
        named = checked(dict[str, str], read_object(index).get("weight_map"), "weight_map")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{index} does not say which files hold the weights ({error}): download the model again"
        ) from error
    files = [folder / Path(name).name for name in sorted(set(named.values()))]
    if absent := [file for file in files if not file.is_file()]:
        raise DataError(f"{absent[0]} is missing: download the model again")
    return files


def downloaded(model: str, option: str = OPTION) -> Path:
    """The folder with the files of a model on the hub; `option` is what named it.

    Raises:
        DataError: it could not be downloaded.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, allow_patterns=list(FILES)))
        return (
            folder
            if weight_files(folder)
            else Path(snapshot_download(model, allow_patterns=[*FILES, *OLDER]))
        )
    except DataError:
        raise
    except Exception as error:  # of the download: urllib's, huggingface_hub's
        raise DataError(
            f"hf/{model} could not be downloaded ({type(error).__name__}): fetch its files elsewhere (config.json, "
            "model.safetensors, and tokenizer.json or, of Marian, source.spm, target.spm and vocab.json) and give "
            f"their folder as {option} FOLDER"
        ) from error
