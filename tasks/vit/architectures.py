"""Which ViT to build: presets by name, or what goes with pretrained weights; and loading those weights."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_only

from datamodules.utils.files import parse_object, read_object
from modules.config import StackConfig, require
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.pretrained.timm_configs import UNTOLD, config_from_timm_model, config_from_timm_state
from modules.pretrained.vit import to_tessera
from modules.schema import checked, from_dict
from tasks.checkpoints.weights import read_header, read_weights, with_classes
from tasks.cli.parsing import Options, flat
from tasks.errors import DataError, UsageError, unknown_name, usage_errors

SIZES = {
    "img_size",
    "in_chans",
    "num_classes",
    "dynamic_img_size",
}  # of timm's arguments, those that shapes tell, or that weights do not depend on


@dataclass(frozen=True)
class Architecture:
    """What the shapes of weights do not tell.

    Args:
        config: What is known; shapes decide on the rest.
        name: timm's, where the weights must have the sizes of that model.
        prefix_positions: Whether pos_embed covers class and register tokens.
        class_names: Of the classifier's rows; None: not known.
        data: Options of the data that go with it.
    """

    config: ViTConfig
    name: str | None = None
    prefix_positions: bool | None = None
    class_names: list[str] | None = None
    data: Options = field(default_factory=dict)


def presets() -> dict[str, Options]:
    """The named sizes as options; classes and channels come from the data."""
    return {
        name: asdict(replace(config, num_classes=None, channels=None))
        for name, config in VIT_PRESETS.items()
    }


def pretrained_options(source: str) -> Options:
    """The network, and the normalisation where it is known, that go with pretrained weights.

    Args:
        source: `timm/<model name>`, or a local .safetensors or .pth file with timm's names.

    Raises:
        UsageError: no such model or file, or one that is not a plain ViT.
    """
    found = architecture(source)
    if source.startswith("timm/"):
        assert found is not None
        return {
            "model": {"net": asdict(replace(found.config, num_classes=None))},
            "data": found.data,
        }
    weights = read_weights(source)
    known = found or Architecture(ViTConfig(pool="mean", stack=StackConfig(heads=1)))
    with usage_errors(f"--model.pretrained {source}"):
        config = config_from_timm_state(weights, known.config, known.prefix_positions)
        if known.name is not None:
            check_sizes(known.name, known.config, config)
    net = asdict(replace(config, num_classes=None))
    if found is None:
        net["class_token"] = config.has_class_token
        del net["pool"]
        net["stack"] = {name: value for name, value in net["stack"].items() if name not in UNTOLD}
    return {"model": {"net": net}, "data": {}}


def check_sizes(name: str, wanted: ViTConfig, config: ViTConfig) -> None:
    """Raises `ValueError` where weights do not have the sizes of the timm model; images, classes may be others."""
    wanted = replace(
        wanted,
        image_size=config.image_size,
        channels=config.channels,
        num_classes=config.num_classes,
    )
    had = flat(asdict(config))
    differ = [
        f"{option} is {had[option]}, not {value}"
        for option, value in flat(asdict(wanted)).items()
        if had[option] != value
    ]
    require(not differ, f"these are not weights of {name}: {', '.join(differ)}.")


def check_named(source: str, named: Collection[str]) -> None:
    """Refuse a file whose architecture is not known, unless options say all that its shapes do not.

    Args:
        source: As in `pretrained_options`.
        named: Options that are typed or in a config.

    Raises:
        UsageError: names those that are not.
    """
    needed = ["--model.net.pool", *(f"--model.net.stack.{name}" for name in UNTOLD)]
    missing = [name for name in needed if name not in named]
    if missing and not source.startswith("timm/") and architecture(source) is None:
        raise UsageError(
            f"--model.pretrained {source}: the shapes of its weights do not say which timm model it is: add "
            f"{', '.join(missing)}, or name the file as the model (vit_base_patch16_224.safetensors), or put its "
            "config.json beside it"
        )


def architecture(source: str) -> Architecture | None:
    """What is known about weights: of timm's model, from the header of our export, or by the name of timm's model.

    The name is the "architecture" of a config.json beside the file, else that of the file itself, tags aside.

    Args:
        source: As in `pretrained_options`.

    Raises:
        UsageError: no such model, or one that is not a plain ViT.
    """
    if source.startswith("timm/"):
        model = timm_model(source, device="meta")
        data = {"dataset": {name: list(model.pretrained_cfg[name]) for name in ("mean", "std")}}
        return of_timm(source, model, class_names=imagenet_names(model), data=data)
    header = read_header(source)
    if "config" not in header:
        return by_name(source)
    with usage_errors(f"--model.pretrained {source}: its header"):
        config = from_dict(ViTConfig, parse_object(header["config"]))
        names = checked(
            list[str] | None,
            parse_object(header.get("facts", "{}")).get("class_names"),
            "class_names",
        )
        options = {name: getattr(config.stack, name) for name in ("width", *UNTOLD, "layer_scale")}
        known = ViTConfig(pool=config.pool, stack=StackConfig(**options))
    return Architecture(known, prefix_positions=not config.register_tokens, class_names=names)


def by_name(source: str) -> Architecture | None:
    """The timm model that a config.json beside a file names, else the file's own name.

    Returns:
        None where neither names one, they contradict each other, or the config.json changes more than sizes.

    Raises:
        UsageError: the model is not a plain ViT, or the config.json cannot be read.
    """
    import timm

    own, file = Path(source).stem.partition(".")[0], Path(source).with_name("config.json")
    settings: Options = {}
    if file.exists():
        try:
            settings = read_object(file)
            arguments = checked(Options, settings.get("model_args") or {}, "model_args")
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UsageError(
                f"--model.pretrained {source}: {file} cannot be read ({reason}): repair or move it"
            ) from error
        if arguments.keys() - SIZES:
            return None
    name = str(settings.get("architecture", own))
    if not timm.is_model(name) or (timm.is_model(own) and name != own):
        return None
    model = timm_model(name, device="meta")
    if settings.get("global_pool", model.global_pool) != model.global_pool:
        return None
    return of_timm(source, model, name=name)


def of_timm(source: str, model: Any, **known: Any) -> Architecture:
    """What a model of timm's says, and what else is known.

    Raises:
        UsageError: it is not a plain ViT.
    """
    with usage_errors(f"--model.pretrained {source}"):
        return Architecture(
            config_from_timm_model(model), prefix_positions=not model.no_embed_class, **known
        )


def imagenet_names(model: Any) -> list[str] | None:
    """The synsets that a model of timm's tells apart, such as n01440764; None: its classes are not ImageNet's."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(model) if model.num_classes else None
    return ImageNetInfo(subset).label_names() if subset else None


def load_pretrained(net: ViT, source: str, facts: Mapping[str, Any]) -> None:
    """Load pretrained weights into `net`, positions re-gridded to its image size; says where the head starts anew.

    Args:
        net: The network.
        source: As in `pretrained_options`.
        facts: Of the data, with their `class_names`.

    Raises:
        UsageError: the weights do not fit the network.
        DataError: timm cannot download them.
    """
    known = architecture(source)
    if not source.startswith("timm/"):
        state = read_weights(source)
    else:
        try:
            state = timm_model(source, pretrained=True).state_dict()
        except Exception as error:  # of the download: urllib's, huggingface_hub's, timm's own
            raise DataError(
                f"the weights of {source} could not be downloaded ({type(error).__name__}): fetch the file "
                "elsewhere and give it as --model.pretrained FILE.safetensors"
            ) from error
    try:
        weights = to_tessera("timm", state, net.config, known.prefix_positions if known else None)
    except ValueError as error:
        raise UsageError(
            f"--model.pretrained {source} does not fit --model.net: {error}"
        ) from error
    if not any(
        name.startswith("head.linear.") for name in weights
    ):  # they are of another number of classes
        rank_zero_only(print)(f"--model.pretrained {source}: the head starts anew")
    weights = with_classes(
        source, weights, known.class_names if known else None, facts["class_names"]
    )
    net.load_state_dict(weights, strict=False)  # to_tessera allows only the head to be left out


def timm_model(source: str, pretrained: bool = False, device: str = "cpu") -> Any:
    """timm's model for `timm/<name>`.

    Raises:
        UsageError: timm has no such model.
    """
    import timm

    name = source.removeprefix("timm/")
    if not timm.is_model(name):
        raise UsageError(unknown_name(name, timm.list_models("vit_*"), "timm model"))
    known = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    if "." in name and name not in known:
        raise UsageError(unknown_name(name, known, "timm model"))
    with torch.device(device):
        return timm.create_model(name, pretrained=pretrained)
