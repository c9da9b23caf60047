"""Which network to build: sizes that fit the data, and pretrained weights."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from pytorch_lightning.utilities import rank_zero_only

from modules.config import require
from modules.models.images import ImageNet, build_image_net
from modules.models.vit import ViTConfig
from modules.pretrained.images import conversion
from modules.pretrained.timm import NOT_IN_SHAPES
from modules.pretrained.weights import CLASSIFIERS, load_weights
from tasks.checkpoints.weights import PRETRAINED, load_pretrained_weights, match_classes
from tasks.errors import UsageError
from tasks.options import Options
from tasks.vit.pretrained import check_normalisation, find_model
from tasks.vit.pretrained_base import Pretrained


def pretrained_options(source: str) -> Options:
    """Returns the network and, if known, the preprocessing of `--model.pretrained SOURCE`."""
    model = find_model(source)
    config = model.config()
    config = conversion(config).for_new_sizes(config)
    net = asdict(replace(config, num_classes=None))
    if not model.is_described and isinstance(config, ViTConfig):  # options describe the rest
        net["class_token"] = config.has_class_token
        del net["pool"]
        for name in NOT_IN_SHAPES:
            del net["stack"][name]
    # Grey weights may be named after a model of colour images: the data tell their mean, then.
    fits = len(model.normalisation.get("mean", ())) == config.channels
    data = {"dataset": model.preprocessing} if fits else {}
    return {"model": {"net": net}, "data": data}


def check_described(source: str, given: Collection[str]) -> None:
    """Refuses a file of an unknown model, unless the options in `given` describe the model."""
    needed = ["--model.net.pool", *(f"--model.net.stack.{name}" for name in NOT_IN_SHAPES)]
    missing = [name for name in needed if name not in given]
    is_described = source.startswith(("timm/", "hf/")) or source.endswith(".ckpt")
    if not missing or is_described:
        return
    model = find_model(source)
    if model.is_described:
        return
    if model.unknown_arguments:
        unknown = ", ".join(model.unknown_arguments)
        raise UsageError(
            f"{PRETRAINED} {source}: Tessera does not know {unknown}, which model_args "
            f"of config.json has: if it changes nothing, add {', '.join(missing)}"
        )
    raise UsageError(
        f"{PRETRAINED} {source}: its shapes do not say which timm model it is: add "
        f"{', '.join(missing)}, or name the file like the model "
        "(vit_base_patch16_224.safetensors)"
    )


def load_pretrained(net: ImageNet, source: str, metadata: Mapping[str, Any]) -> None:
    """Loads weights into `net`, positions resized; says if the classifier is initialised anew.

    Raises:
        UsageError: The weights do not fit the network.
        DataError: They cannot be downloaded.
    """
    model = find_model(source)
    weights = model.weights(net.config)
    if not any(name.startswith(CLASSIFIERS) for name in weights):  # another number of classes
        rank_zero_only(print)(f"{PRETRAINED} {source}: the head is initialised anew")
    weights = match_classes(source, weights, model.class_names, metadata)
    load_pretrained_weights(net, source, weights, model.new_parts)


def find_described(source: str, option: str) -> Pretrained:
    """Returns a pretrained model whose config and normalisation are known, or raises `UsageError`.

    Arguments and other errors as in `find_model`.
    """
    model = find_model(source, option)
    require_described(model)
    return model


def require_described(model: Pretrained) -> None:
    """Raises `UsageError` unless config and normalisation of a pretrained model are known."""
    if not model.is_described:
        raise UsageError(
            f"{model.named}: nothing says which model it is: train from it with {PRETRAINED}"
        )
    if not model.normalisation:
        raise UsageError(
            f"{model.named}: nothing says mean and standard deviation of its pixels, as "
            f"preprocessor_config.json of Hugging Face does: train from it with {PRETRAINED}"
        )
    channels = model.config().channels
    with model.errors():
        check_normalisation(model.normalisation, channels)


def with_weights(source: str, option: str) -> tuple[ImageNet, dict[str, Any]]:
    """Builds a network with its weights, and metadata as in a checkpoint, without any data.

    Args:
        source: See `find_model`.
        option: What names it in messages.

    Raises:
        UsageError: There is no such model, it has no classifier, or it is not known what its
            classes and its pixels are.
        DataError: It cannot be downloaded, or is damaged.
    """
    return described_network(find_described(source, option))


def described_network(model: Pretrained) -> tuple[ImageNet, dict[str, Any]]:
    """As `with_weights`, of a model that `find_described` returned."""
    config = model.config()
    names = model.titles or model.class_names
    names = names or [str(row) for row in range(config.num_classes or 0)]
    metadata = {
        "class_names": names,
        **model.image_metadata(),
        **model.targets,
    }
    with model.errors():
        classifier = config.num_classes is not None
        require(classifier, f"it has no classifier: train one from it with {PRETRAINED}")
        fits = len(names) == config.num_classes
        require(fits, f"it names {len(names)} classes, but predicts {config.num_classes}")
        net = build_image_net(config)
    weights = model.weights(config)
    with model.errors():
        load_weights(net, weights)
    return net, metadata
