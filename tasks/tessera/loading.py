"""Which model a path or a name stands for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, overload

import torch
from torch import nn

from modules.generation.quantized import QuantizationName, prepare
from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.models.mae import MAEConfig, MaskedAutoencoder
from modules.pretrained import bert as bert_weights
from modules.pretrained import images as image_families
from modules.pretrained import mae as mae_weights
from modules.pretrained.decoder import IMAGE_FAMILIES
from tasks.bert.architectures import with_weights
from tasks.checkpoints.pretrained import (
    Families,
    ModelFolder,
    find_checkpoint,
    model_folder,
    read_settings,
)
from tasks.checkpoints.reading import (
    KEY,
    Checkpoint,
    load_network,
    read_checkpoint,
)
from tasks.checkpoints.weights import read_exported, read_header
from tasks.errors import UsageError, usage_errors
from tasks.igpt import architectures as igpt
from tasks.inference import DeviceName, on_device
from tasks.lm import architectures as lm
from tasks.mae import pretrained as mae
from tasks.seq2seq import architectures as seq2seq
from tasks.vit.architectures import with_weights as image_with_weights
from tasks.vit.networks import load_image_net

from .images import ImageClassifier, MaskedImageModel
from .language import LanguageModel
from .models import Model
from .pixels import ImageGenerator
from .texts import MaskedLanguageModel, TextClassifier
from .translation import Translator

WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")  # of files of weights alone
OPTION = "tessera.load"  # in messages, where the command line has the name of an option
AnyModel = (
    ImageClassifier
    | MaskedImageModel
    | ImageGenerator
    | TextClassifier
    | MaskedLanguageModel
    | LanguageModel
    | Translator
)
OfKind = TypeVar("OfKind", bound=Model)
# Of tasks with one network: its config, how it is built, and the model in Python.
NETWORKS: dict[str, tuple[type[Any], Callable[[Any], nn.Module], type[Model]]] = {
    "mae": (MAEConfig, MaskedAutoencoder, MaskedImageModel),
    "bert": (BertConfig, BertClassifier, TextClassifier),
    "mlm": (BertConfig, BertMaskedLM, MaskedLanguageModel),
}


@overload
def load(
    source: str | Path,
    device: DeviceName = "auto",
    threads: int | None = None,
    quantize: QuantizationName | None = None,
    packed: bool = False,
) -> AnyModel: ...


@overload
def load(
    source: str | Path,
    device: DeviceName = "auto",
    threads: int | None = None,
    quantize: QuantizationName | None = None,
    packed: bool = False,
    *,
    kind: type[OfKind],
) -> OfKind: ...


def load(
    source: str | Path,
    device: DeviceName = "auto",
    threads: int | None = None,
    quantize: QuantizationName | None = None,
    packed: bool = False,
    *,
    kind: type[Model] = Model,
) -> Model:
    """Loads a trained model.

    >>> model = tessera.load(run_folder)
    >>> model.net.training
    False

    Args:
        source: A run folder, of which the best checkpoint is taken, or else the last; a checkpoint;
            a folder of Hugging Face's or timm's layout, as `export` writes them; `hf/<model>` or
            `timm/<model>`, which are downloaded; a .safetensors file that `export` wrote; or a
            .safetensors, .pth, .pt or .bin file of timm's weights that is named after its model,
            with timm's mean and std.
        device: Where to compute; "auto": on a GPU if there is one, but int8 on the CPU.
        threads: Threads of this process on a CPU; None: as they are.
        quantize: "int8": weights in a quarter of the memory, on a CPU; None: as they are.
        packed: Lay out the weights of linear layers for fast inference on a CPU. `net` can then be
            neither trained nor saved.
        kind: Class that the model must have, such as `tessera.Translator`, so that type checkers
            know its methods.

    Returns:
        An `ImageClassifier`, `MaskedImageModel`, `ImageGenerator`, `TextClassifier`,
        `MaskedLanguageModel`, `LanguageModel` or `Translator`.

    Raises:
        UsageError: There is no such model, it is of another kind, or it is not supported.
        DataError: It cannot be downloaded, or its weights are damaged.
        RunError: Its checkpoint is damaged.
    """
    if quantize not in (None, *get_args(QuantizationName)):
        raise UsageError(f"quantize is {quantize!r}, but must be 'int8' or None.")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(f"threads is {threads!r}, but must be a whole number of at least 1.")
    model = find(str(source))
    if not isinstance(model, kind):
        raise UsageError(
            f"{source} is of class {type(model).__name__}, not {kind.__name__}: give another model"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    on_device(model.net, device, quantize, option="device")
    if packed or quantize:
        with usage_errors(f"quantize={quantize!r}" if quantize else "packed=True"):
            prepare(model.net, quantize)
    return model


def find(source: str, option: str = OPTION) -> Model:
    """Returns the model that a path or a name stands for, on the CPU; messages name the option."""
    is_file = Path(source).suffix in WEIGHT_SUFFIXES and not Path(source).is_dir()
    if source.endswith(".safetensors") and is_file and "task" in read_header(source, option):
        return from_checkpoint(read_exported(source, option), source)
    if is_file or source.startswith("timm/"):
        return image_weights(source, option)
    source = find_checkpoint(source, option)
    if source.startswith("hf/") or Path(source).is_dir():
        return from_folder(source, option)
    return from_checkpoint(read_checkpoint(source), source)


def from_checkpoint(checkpoint: Checkpoint, source: str) -> Model:
    """Returns the model of what `fit` or `export --format safetensors` wrote."""
    entry = checkpoint[KEY]
    task = entry["task"]
    if task == "lm":
        return LanguageModel(lm.from_checkpoint(checkpoint), source)
    if task == "igpt":
        return ImageGenerator(igpt.from_checkpoint(checkpoint), source)
    if task == "seq2seq":
        return Translator(seq2seq.from_checkpoint(checkpoint), source)
    if task == "vit":
        return ImageClassifier(load_image_net(checkpoint), entry["metadata"], source)
    if task not in NETWORKS:
        raise UsageError(f"checkpoint '{source}' is of task '{task}', which has no Python model")
    config, build, model = NETWORKS[task]
    return model(load_network(checkpoint, config, build), entry["metadata"], source)


def from_folder(source: str, option: str) -> Model:
    """Returns the model of a folder of Hugging Face's or timm's layout, or of the hub."""
    path = model_folder(source, option)
    if "architecture" in read_settings(path, "config.json", option):  # of timm
        return image_weights(source, option)
    families: Families = {
        **bert_weights.FAMILIES,
        **lm.FAMILIES,
        **IMAGE_FAMILIES,
        **seq2seq.FAMILIES,
        **image_families.TRANSFORMERS,
        **mae_weights.FAMILIES,
    }
    folder = ModelFolder(str(path), families, option)
    if folder.family in mae_weights.FAMILIES:
        return MaskedImageModel(*mae.with_weights(path, source, option), source)
    if folder.family in image_families.TRANSFORMERS:
        return image_weights(source, option)
    if folder.family in lm.FAMILIES:
        return LanguageModel(lm.load_folder(folder), source)
    if folder.family in IMAGE_FAMILIES:
        return ImageGenerator(igpt.load_folder(folder), source)
    if folder.family in seq2seq.FAMILIES:
        return Translator(seq2seq.load_folder(folder), source)
    return from_bert_folder(folder, source)


def from_bert_folder(folder: ModelFolder, source: str) -> Model:
    """Returns a text classifier, or else a masked language model, of Hugging Face's BERT."""
    net, metadata = with_weights(folder)
    if isinstance(net, BertClassifier):
        return TextClassifier(net, metadata, source)
    return MaskedLanguageModel(net, metadata, source)


def image_weights(source: str, option: str) -> ImageClassifier:
    """Returns a model of images, of timm or Hugging Face."""
    net, metadata = image_with_weights(source, option)
    return ImageClassifier(net, metadata, source)
