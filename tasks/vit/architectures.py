"""Which ViT to build: presets, sizes that fit the data, and pretrained weights."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_only

from datamodules.utils.files import parse_object, read_object
from modules.config import StackConfig, require
from modules.models.vit import ViT, ViTConfig
from modules.pretrained.timm import NOT_IN_SHAPES, config_from_timm_model, config_from_timm_state
from modules.pretrained.vit import TIMM
from modules.schema import checked, from_dict
from tasks.checkpoints.weights import PRETRAINED, State, match_classes, read_header, read_weights
from tasks.errors import DataError, UsageError, unknown_name, usage_errors
from tasks.options import Options, flat

# Arguments of timm that shapes tell, or that weights do not depend on.
SIZE_ARGUMENTS = {"img_size", "in_chans", "num_classes", "dynamic_img_size"}


@dataclass(frozen=True)
class KnownModel:
    """What is known about a file of weights besides its shapes.

    Args:
        config: Of the model; its sizes are replaced by those of the weights.
        name: Model in timm whose sizes the weights must have; None: any sizes.
        prefix_positions: Whether pos_embed has rows for class and register tokens.
        class_names: Class of each row of the classifier; None: not known.
        data: Options of the data that come with it.
    """

    config: ViTConfig
    name: str | None = None
    prefix_positions: bool | None = None
    class_names: list[str] | None = None
    data: Options = field(default_factory=dict)


def pretrained_options(source: str) -> Options:
    """Returns the network and, if known, the normalisation of `--model.pretrained SOURCE`."""
    known = known_model(source)
    if source.startswith("timm/"):
        assert known is not None
        return {
            "model": {"net": asdict(replace(known.config, num_classes=None))},
            "data": known.data,
        }
    weights = read_weights(source)
    base = known or KnownModel(ViTConfig(pool="mean", stack=StackConfig(heads=1)))
    with usage_errors(f"{PRETRAINED} {source}"):
        config = config_from_timm_state(weights, base.config, base.prefix_positions)
        if base.name is not None:
            check_timm_sizes(base.name, config, base.config)
    net = asdict(replace(config, num_classes=None))
    if known is None:  # other options describe the rest
        net["class_token"] = config.has_class_token
        del net["pool"]
        for name in NOT_IN_SHAPES:
            del net["stack"][name]
    return {"model": {"net": net}, "data": {}}


def check_timm_sizes(model: str, config: ViTConfig, model_config: ViTConfig) -> None:
    """Raises `ValueError` if weights do not have the sizes of a timm model."""
    free_sizes = {name: getattr(config, name) for name in ("image_size", "channels", "num_classes")}
    expected = flat(asdict(replace(model_config, **free_sizes)))
    differ = [
        f"{name} is {value}, not {expected[name]}"
        for name, value in flat(asdict(config)).items()
        if value != expected[name]
    ]
    require(not differ, f"these are not weights of {model}: {', '.join(differ)}.")


def check_described(source: str, given: Collection[str]) -> None:
    """Refuses a file of an unknown model, unless the options in `given` describe the model."""
    needed = ["--model.net.pool", *(f"--model.net.stack.{name}" for name in NOT_IN_SHAPES)]
    missing = [name for name in needed if name not in given]
    if missing and not source.startswith("timm/") and known_model(source) is None:
        raise UsageError(
            f"{PRETRAINED} {source}: its shapes do not say which timm model it is: add "
            f"{', '.join(missing)}, or name the file like the model "
            "(vit_base_patch16_224.safetensors)"
        )


def known_model(source: str) -> KnownModel | None:
    """Returns what timm, the header of our export, or the name of a file says about weights."""
    if source.startswith("timm/"):
        model = timm_model(source, device="meta")
        data = {"dataset": {name: list(model.pretrained_cfg[name]) for name in ("mean", "std")}}
        return from_timm(source, model, class_names=imagenet_names(model), data=data)
    header = read_header(source)
    if "config" not in header:
        return model_by_name(source)
    with usage_errors(f"{PRETRAINED} {source}: its header"):
        config = from_dict(ViTConfig, parse_object(header["config"]))
        metadata = parse_object(header.get("metadata", "{}"))
        names = checked(list[str] | None, metadata.get("class_names"), "class_names")
        # Sizes come from the shapes, as those of any other file.
        options = ("width", *NOT_IN_SHAPES, "layer_scale")
        stack = StackConfig(**{name: getattr(config.stack, name) for name in options})
        known = ViTConfig(pool=config.pool, stack=stack)
    return KnownModel(known, prefix_positions=not config.register_tokens, class_names=names)


def model_by_name(source: str) -> KnownModel | None:
    """Returns the timm model that a config.json beside a file names, or else the file's own name.

    None if neither names one, they differ, or the config.json changes more than sizes.
    """
    import timm

    own = Path(source).stem.partition(".")[0]
    file = Path(source).with_name("config.json")
    settings: Options = {}
    if file.exists():
        try:
            settings = read_object(file)
            arguments = checked(Options, settings.get("model_args") or {}, "model_args")
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UsageError(
                f"{PRETRAINED} {source}: {file} ({reason}): repair or move it"
            ) from error
        if arguments.keys() - SIZE_ARGUMENTS:
            return None
    name = str(settings.get("architecture", own))
    if not timm.is_model(name) or (timm.is_model(own) and name != own):
        return None
    model = timm_model(name, device="meta")
    if settings.get("global_pool", model.global_pool) != model.global_pool:
        return None
    return from_timm(source, model, name=name)


def from_timm(source: str, model: Any, **known: Any) -> KnownModel:
    """Returns what a model of timm says; raises `UsageError` if it is no plain ViT."""
    with usage_errors(f"{PRETRAINED} {source}"):
        config = config_from_timm_model(model)
    return KnownModel(config, prefix_positions=not model.no_embed_class, **known)


def imagenet_names(model: Any) -> list[str] | None:
    """Returns the synsets of a timm model's classes, such as n01440764; None if not of ImageNet."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(model) if model.num_classes else None
    return ImageNetInfo(subset).label_names() if subset else None


def load_pretrained(net: ViT, source: str, metadata: Mapping[str, Any]) -> None:
    """Loads weights into `net`, positions resized; says if the classifier is initialised anew.

    Raises:
        UsageError: The weights do not fit the network.
        DataError: timm cannot download them.
    """
    known = known_model(source)
    prefix_positions = known.prefix_positions if known else None
    state = timm_weights(source) if source.startswith("timm/") else read_weights(source)
    try:
        weights = TIMM.weights_from_external(state, net.config, prefix_positions)
    except ValueError as error:
        raise UsageError(f"{PRETRAINED} {source} does not fit --model.net: {error}") from error
    if "head.linear.weight" not in weights:  # another number of classes
        rank_zero_only(print)(f"{PRETRAINED} {source}: the head is initialised anew")
    names = known.class_names if known else None
    weights = match_classes(source, weights, names, metadata["class_names"])
    net.load_state_dict(weights, strict=False)  # only the head may be missing by now


def timm_weights(source: str) -> State:
    try:
        return timm_model(source, pretrained=True).state_dict()
    except Exception as error:  # of urllib, huggingface_hub, timm
        reason = type(error).__name__
        raise DataError(
            f"{source} could not be downloaded ({reason}): give it as {PRETRAINED} FILE.safetensors"
        ) from error


def timm_model(source: str, pretrained: bool = False, device: str = "cpu") -> Any:
    """Builds timm's model for `timm/<name>`; raises `UsageError` if timm has no such model."""
    import timm

    name = source.removeprefix("timm/")
    if not timm.is_model(name):
        raise UsageError(unknown_name(name, timm.list_models("vit_*"), "timm model"))
    known = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    if "." in name and name not in known:
        raise UsageError(unknown_name(name, known, "timm model"))
    with torch.device(device):
        return timm.create_model(name, pretrained=pretrained)
