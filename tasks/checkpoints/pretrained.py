"""Pretrained models: checkpoints, folders of Hugging Face, the hub; and tokenizers of texts."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from datamodules.sources import ProblemType
from datamodules.tokenizers import Tokenizer
from datamodules.utils.cache import cache_folder, content_key, unwritable
from datamodules.utils.files import read_object, replacing
from modules.config import require
from modules.pretrained.family import TransformersFamily, config_from_huggingface
from modules.pretrained.settings import Settings
from modules.schema import check_value
from tasks.checkpoints.reading import (
    KEY,
    Checkpoint,
    best_checkpoint,
    net_weights,
    onnx_message,
    read_checkpoint,
)
from tasks.checkpoints.weights import PRETRAINED, State, match_classes, read_weights
from tasks.errors import DataError, UsageError, usage_errors
from tasks.options import Options

Families = Mapping[str, TransformersFamily[Any]]
CONFIG_FILES = ("config.json", "generation_config.json", "preprocessor_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
OLDER_TOKENIZER_FILES = ("added_tokens.json", "vocab.txt", "vocab.json", "merges.txt")
SENTENCEPIECE_FILES = ("source.spm", "target.spm", "target_vocab.json", "spiece.model")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
DOWNLOADED_FILES = (
    *CONFIG_FILES,
    *TOKENIZER_FILES,
    *OLDER_TOKENIZER_FILES,
    *SENTENCEPIECE_FILES,
    *WEIGHT_FILES,
)
# Downloaded if there are no safetensors.
PYTORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
CKPT_PATH = "--ckpt_path"  # names a model to use, as PRETRAINED names one to train


def checkpoint_options(source: str, tasks: Sequence[str], **open_options: Any) -> Options:
    """Returns the network and the tokenizer of a checkpoint as options, without dropout rates.

    Args:
        source: A checkpoint of `fit`.
        tasks: Tasks whose networks will do.
        open_options: Options of the network that the new data decide, such as `num_classes=None`.
    """
    saved = read_task_checkpoint(source, tasks)[KEY]
    tokenizer = tokenizer_file(source, saved["metadata"]["tokenizer"])
    return model_options(tokenizer, without_dropout({**saved["net"], **open_options}))


def model_options(tokenizer: Path, net: Options) -> Options:
    """Returns a network and its tokenizer, a file or folder, as options."""
    return {"model": {"net": net}, "data": {"tokenizer": {"file": str(tokenizer)}}}


def without_dropout(net: Options) -> Options:
    """Returns options of a network without dropout rates.

    Each run chooses these itself: what suits pretraining on much text overfits few labels.
    """
    kept = {}
    for name, value in net.items():
        if isinstance(value, dict):
            kept[name] = without_dropout(value)
        elif name != "drop_path" and not name.endswith("dropout"):
            kept[name] = value
    return kept


def pretrained_weights(
    source: str, tasks: Sequence[str], metadata: Mapping[str, Any], families: Families
) -> State:
    """Returns weights under our names.

    The classifier's rows are in the order of the data's classes; with others it is left out.

    Args:
        source: A checkpoint of `fit`, `hf/<model>`, or a local folder of Hugging Face's layout.
        tasks: Tasks whose networks will do.
        metadata: Of the data, with their `tokenizer`, and `class_names` if they have classes.
        families: Families of Hugging Face that will do.
    """
    if source.endswith(".ckpt"):
        checkpoint = read_task_checkpoint(source, tasks)
        saved = checkpoint[KEY]["metadata"]
        tokenizer = Tokenizer.from_json(saved["tokenizer"])
        names = saved.get("class_names")
        state = net_weights(checkpoint)
    else:
        folder = ModelFolder(source, families)
        tokenizer = Tokenizer.from_file(folder.path)
        names = folder.class_names()
        state = folder.weights()
    check_tokenizer(source, tokenizer, metadata["tokenizer"])
    return match_classes(source, state, names, metadata)


class ModelFolder:
    """A model in Hugging Face's layout.

    Args:
        source: `hf/<model>`, which is downloaded, or a local folder.
        families: Families of models that will do.
        option: The option that names it, for messages.

    Attributes:
        source, option: As given.
        path: The folder.
        settings: Content of its `config.json`.
        family: Name of the family.
        config: Of our network.

    Raises:
        UsageError: There is no such folder or config.json, or the model is not supported.
        DataError: It could not be downloaded.
    """

    def __init__(self, source: str, families: Families, option: str = PRETRAINED) -> None:
        self.source = source
        self.families = families
        self.option = option
        self.path = model_folder(source, option)
        self.settings = read_settings(self.path, "config.json", option)
        with self.config_errors():
            self.family, self.config = config_from_huggingface(self.settings, families)

    def config_errors(self) -> AbstractContextManager[None]:
        """Turns a `ValueError` about config.json into a `UsageError`."""
        return usage_errors(f"{self.option} {self.path / 'config.json'}")

    def class_names(self) -> list[str] | None:
        """Returns the class of each row of a classifier; None if `id2label` does not name each."""
        # transformers leaves these names out of the file.
        default = {str(row): f"LABEL_{row}" for row in range(self.settings.get("num_labels") or 2)}
        with self.config_errors():
            names = check_value(
                dict[str, str], self.settings.get("id2label") or default, "id2label"
            )
        rows = [str(row) for row in range(len(names))]
        return [names[row] for row in rows] if names.keys() == set(rows) else None

    def problem_type(self) -> str:
        """Returns the problem type of a classifier, as transformers tells it."""
        classes = self.config.num_classes
        default = "regression" if classes == 1 else "single_label_classification"
        with self.config_errors():
            kind = check_value(
                ProblemType | None, self.settings.get("problem_type"), "problem_type"
            )
            kind = kind or default
            fits = kind != "regression" or classes in (None, 1)
            require(fits, f"problem_type regression has {classes} numbers; 1 is supported.")
        return kind

    def state(self) -> State:
        """Returns weights under their names."""
        state: State = {}
        for file in weight_files(self.path):
            state |= read_weights(str(file), self.option)
        return state

    def weights(self) -> State:
        """Returns weights under our names."""
        state = self.state()
        with self.config_errors():
            return self.families[self.family].weights_from_external(state, self.config)


def read_settings(folder: Path, name: str, option: str) -> Settings:
    """Returns the content of a JSON file in the folder of a model that `option` names.

    Raises `UsageError` if there is no such file, or it is damaged.
    """
    try:
        return read_object(folder / name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{option} {folder} has no readable {name} ({reason}): give another folder"
        ) from error


def read_task_checkpoint(source: str, tasks: Sequence[str], option: str = PRETRAINED) -> Checkpoint:
    """Returns the checkpoint, if it is of one of these tasks; else raises `UsageError`."""
    checkpoint = read_checkpoint(source)
    task = checkpoint[KEY]["task"]
    if task not in tasks:
        raise UsageError(f"{option} {source} is of task '{task}': give one of {' or '.join(tasks)}")
    return checkpoint


def check_tokenizer(source: str, theirs: Tokenizer, own: str) -> None:
    """Refuses data whose tokenizer is not the one that the weights were trained with."""
    tokenizer = Tokenizer.from_json(own)
    if tokenizer.digest != theirs.digest:
        raise UsageError(
            f"the tokenizer of the data ({tokenizer.vocab_size} tokens) is not that of {source} "
            f"({theirs.vocab_size} tokens): leave --data.tokenizer out, it comes with the weights"
        )


def tokenizer_file(source: str, content: str) -> Path:
    """Returns a file with the tokenizer of a checkpoint: in its run folder, or in the cache."""
    return file_with(content, source, "tokenizer")


def file_with(content: str, source: str, kind: str) -> Path:
    """Returns a file with this content: KIND.json in the run folder, or one in the cache."""
    beside = Path(source).resolve().parent.parent / f"{kind}.json"
    if beside.is_file() and beside.read_bytes() == content.encode():
        return beside
    path = cache_folder(f"{kind}s") / f"{content_key(content)}.{kind}.json"
    try:
        with replacing(path) as partial:
            partial.write_bytes(content.encode())
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def model_folder(source: str, option: str = PRETRAINED) -> Path:
    """Returns the folder with the files of a model, downloaded if it is `hf/<model>`.

    Raises:
        UsageError: There is no such folder, or it holds no weights.
        DataError: It could not be downloaded.
    """
    wanted = (
        "a checkpoint (.ckpt), or a folder with config.json and model.safetensors and, of texts, "
        "tokenizer.json"
    )
    if source.startswith("hf/"):
        folder = download_folder(source.removeprefix("hf/"), option)
    elif Path(source).is_dir():
        folder = Path(source).resolve()
    else:
        hint = f", or hf/{source} for a model of the hub" if may_be_on_hub(source) else ""
        refuse_file_of_folder(source, option)
        if Path(source).is_file():
            raise UsageError(f"{option} {source} is a file of another kind; give {wanted}")
        raise UsageError(f"{option} {source}: no such file or folder; give {wanted}{hint}")
    if weight_files(folder):
        return folder
    if (folder / "model.onnx").is_file():
        raise UsageError(onnx_message(source))
    if not (folder / "config.json").is_file():
        raise UsageError(f"{option} {source} holds no model: give {wanted}")
    raise UsageError(
        f"{option} {source} has neither model.safetensors nor pytorch_model.bin: give another "
        "model, or save this one again with save_pretrained of transformers"
    )


def find_checkpoint(source: str, option: str = CKPT_PATH) -> str:
    """Returns the best checkpoint of a run folder; any other path, and `hf/<model>`, as it is.

    Raises `UsageError` for the name of a model of the hub without hf/, and for a file of a folder.
    """
    source = best_checkpoint(source)
    refuse_file_of_folder(source, option)
    is_name = may_be_on_hub(source) and not source.startswith("hf/")
    if is_name and not source.endswith(".ckpt") and not Path(source).exists():
        raise UsageError(
            f"{option} {source}: there is no such file or folder; a model of the hub is hf/{source}"
        )
    return source


def refuse_file_of_folder(source: str, option: str) -> None:
    """Raises `UsageError` for weights that have a config.json beside them; it names the folder."""
    file = Path(source)
    is_weights = file.suffix in (".safetensors", ".bin") and file.is_file()
    if is_weights and file.with_name("config.json").is_file():
        raise UsageError(
            f"{option} {source} holds only the weights of a model: give its folder, {file.parent}"
        )


def may_be_on_hub(source: str) -> bool:
    """Whether the name of no file may be that of a model of the hub, without hf/ before it.

    >>> [name for name in ("gpt2", "me/it", "runs/it", "./it", "/tmp/it") if may_be_on_hub(name)]
    ['gpt2', 'me/it']
    """
    owner, slash, _ = source.partition("/")
    is_beside_files = bool(slash) and (owner == "runs" or Path(owner).is_dir())
    return bool(re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source)) and not is_beside_files


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder: safetensors if there are any, else PyTorch's."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return indexed_files(folder / f"{name}.index.json")
    return []


def indexed_files(index: Path) -> list[Path]:
    """Returns the files that an index names; raises `DataError` if one is missing."""
    try:
        names = check_value(dict[str, str], read_object(index).get("weight_map"), "weight_map")
    except (OSError, ValueError) as error:
        raise DataError(f"{index} names no weights ({error}): download the model again") from error
    files = [index.parent / Path(name).name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing: download the model again")
    return files


def download_folder(model: str, option: str = PRETRAINED) -> Path:
    """Returns the folder with the files of a model on the hub; `option` named it."""
    from huggingface_hub import snapshot_download

    advice = (
        "fetch its files elsewhere (config.json, model.safetensors, and preprocessor_config.json, "
        "tokenizer.json or, for Marian, source.spm, target.spm and vocab.json) and give their "
        f"folder as {option} FOLDER"
    )
    with downloading(f"hf/{model}", advice):
        for patterns in ([*DOWNLOADED_FILES], [*DOWNLOADED_FILES, *PYTORCH_FILES]):
            folder = Path(snapshot_download(model, allow_patterns=patterns))
            if weight_files(folder):
                break
    return folder


@contextmanager
def downloading(source: str, advice: str) -> Iterator[None]:
    """Turns errors of a download from the hub into a `DataError`, which ends with `advice`.

    Without a connection, only the cache is read: the hub's library would retry for a minute. Its
    error then has no cause: what the library says of its cache would only mislead.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    was_offline = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.DEFAULT_ETAG_TIMEOUT)
    except Exception:  # of whichever library the hub uses
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # of urllib, huggingface_hub, timm, ...
        reason = type(error).__name__
        cause: Exception | None = error
        if constants.HF_HUB_OFFLINE:
            reason = f"there is no connection to {constants.ENDPOINT}"
            cause = None
        if os.path.exists(source):
            advice = f"a file or folder of this name exists; to use it, write ./{source}"
        raise DataError(f"{source} could not be downloaded ({reason}): {advice}") from cause
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def distinct(names: Sequence[str], marks: Sequence[Any]) -> list[str]:
    """Returns names of classes, with its mark appended to each repeated name.

    >>> distinct(["cat", "crane", "crane"], [0, 1, 2])
    ['cat', 'crane (1)', 'crane (2)']
    """
    counts = Counter(names)  # two classes of ImageNet are called crane
    return [
        name if counts[name] == 1 else f"{name} ({mark})"
        for name, mark in zip(names, marks, strict=True)
    ]
