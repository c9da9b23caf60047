"""Swin of transformers, both versions: weights and config.json, converted both ways."""

from dataclasses import dataclass, field, replace
from typing import Any

from modules.config import StackConfig, require
from modules.models.swin import SwinConfig
from modules.pretrained.family import TransformersFamily
from modules.pretrained.settings import (
    ACTIVATIONS,
    MAX_SIZE,
    Settings,
    build_config,
    check_feedforward,
    check_fixed_options,
    check_heads,
    count_classes,
    read_options,
    write_options,
)
from modules.pretrained.swin import (
    BLOCK,
    COMMON,
    FIRST_VERSION,
    MERGE,
    SECOND_VERSION,
    TABLE,
    SwinFamily,
)
from modules.pretrained.timm_mixer import mlp_ratio
from modules.pretrained.weights import Layers, State
from modules.schema import check_value

# Of transformers' config.json -> ours. embed_dim, num_heads, mlp_ratio and pretrained_window_sizes
# are converted below. embed_dim is not here because their hidden_size is that of the last stage.
OPTIONS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "num_channels": "channels",
    "depths": "depths",
    "window_size": "window_size",
    "qkv_bias": "qkv_bias",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "drop_path_rate": "drop_path",
    "hidden_act": "feedforward",
    "layer_norm_eps": "norm_eps",
}
DEFAULTS = {
    "image_size": 224,
    "patch_size": 4,
    "channels": 3,
    "depths": (2, 2, 6, 2),
    "window_size": 7,
    "qkv_bias": True,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "drop_path": 0.1,
    "feedforward": "gelu",
    "norm_eps": 1e-5,
}
COMMON_OPTIONS = {name: value for name, value in COMMON.items() if name != "feedforward"}


@dataclass(frozen=True, kw_only=True)
class TransformersSwin(SwinFamily, TransformersFamily[SwinConfig]):
    """A Swin of transformers, whose config.json says the sizes; arguments as in both bases."""

    options: dict[str, str] = field(default_factory=lambda: OPTIONS)
    required: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=lambda: DEFAULTS)
    only: dict[str, Any] = field(  # some of their norms have this eps, whatever the file says
        default_factory=lambda: {"use_absolute_embeddings": False, "layer_norm_eps": 1e-5}
    )
    activations: Any = field(default_factory=lambda: ACTIVATIONS)
    unused: str = rf"{SwinFamily.unused}|^(\w+\.)?decoder\.|mask_token$"  # also of SimMIM
    heads: tuple[str, ...] = ("classifier.",)

    def config_from_external(self, settings: Settings) -> SwinConfig:
        """Returns our config; `num_classes` is null unless the file describes a classifier."""
        options = self.read(settings, StackConfig, SwinConfig)
        options |= read_options(settings, {"embed_dim": "width"}, ("width",), StackConfig)
        depths = options["depths"]
        require(len(depths) > 0, "depths is []; give the number of blocks of each stage.")
        heads = check_value(list[int], settings.get("num_heads", [3, 6, 12, 24]), "num_heads")
        require(
            len(heads) > 0 and heads == [2**stage * heads[0] for stage in range(len(depths))],
            f"num_heads is {heads}; give {len(depths)} numbers, each twice the one before.",
        )
        ratio = check_value(float, settings.get("mlp_ratio", 4.0), "mlp_ratio")
        hidden = int(ratio * options["width"])
        require(hidden <= MAX_SIZE, f"mlp_ratio is {ratio}, which is beyond any model.")
        config = build_config(
            SwinConfig,
            options
            | self.fixed
            | {
                "depth": sum(depths),
                "heads": heads[0],
                "mlp_width": hidden,
                "mlp_dropout": 0.0,
                "num_classes": count_classes(settings, "ImageClassification"),
            },
        )
        if config.relative_bias == "mlp":
            config = replace(config, pretrained_windows=pretrained_windows(settings, config))
        self.check_windows(config)
        return config

    def config_to_external(self, config: Any) -> Settings:
        """Returns the config.json of a classifier of ours, without the names of its classes.

        Raises `ValueError` if no model of theirs can equal ours, with the reason.
        """
        self.check(config)
        stack = config.stack
        stages = len(config.depths)
        settings = {
            **write_options(config, self.options, self.activations),
            "embed_dim": stack.width,
            "num_heads": [config.stage(stage).heads for stage in range(stages)],
            "mlp_ratio": mlp_ratio(stack.resolved.mlp_width, stack.width),
            "hidden_size": config.stage(stages - 1).width,
            "model_type": self.architecture.lower(),
            "architectures": [f"{self.architecture}ForImageClassification"],
        }
        if config.relative_bias == "mlp":
            settings["pretrained_window_sizes"] = config.pretrained_windows or [0] * stages
        return settings

    def check(self, config: Any) -> None:
        family = f"transformers' {self.architecture}"
        check_fixed_options(family, config, {"architecture": "swin"})
        check_fixed_options(family, config, COMMON_OPTIONS | self.fixed | {"norm_eps": 1e-5})
        check_feedforward(family, config, self.activations)
        check_heads(family, config.stack)
        self.check_windows(config)

    def check_windows(self, config: SwinConfig) -> None:
        """Raises `ValueError` if transformers has other windows, or cannot run the model.

        It pads before the shift, and we pad after it. Its first version has a table for
        `window_size` only; its second takes sides of odd grids as rounded down.
        """
        stages = zip(config.depths, config.grids, config.window_sizes, strict=True)
        for stage, (depth, grid, window) in enumerate(stages):
            tokens = f"the {grid} tokens of a side of stage {stage}"
            require(
                depth == 1 or grid % window == 0,
                f"window_size {window} does not divide {tokens}, and transformers pads such "
                "windows differently; choose a window_size that divides it.",
            )
            if config.relative_bias == "table":
                require(
                    config.window_size <= grid,
                    f"window_size {config.window_size} is larger than {tokens}, which "
                    "transformers' Swin cannot run; choose a smaller one.",
                )
            else:
                theirs = min(config.window_size, config.grid[0] // 2**stage)
                require(
                    theirs == window,
                    f"transformers' Swinv2 has windows of {theirs} for {tokens}, not of {window}; "
                    "choose a smaller window_size.",
                )

    def check_saved(self, state: State, config: SwinConfig) -> None:
        """Raises `ValueError` unless patches and tables have the sizes of `config`."""
        names = {ours: theirs for ours, (theirs, *_) in self.names(config).items()}
        for ours, theirs in names.items():
            found = TABLE.fullmatch(ours)
            if found and theirs in state:
                rows = (2 * config.window_sizes[int(found[1])] - 1) ** 2
                got = len(state[theirs])
                require(got == rows, f"{theirs} has {got} rows, but {rows} by config.json.")
        patches = names["embed.stem.conv.weight"]
        if patches in state:
            sides = tuple(state[patches].shape[2:])
            size = config.patch_size
            require(
                sides == (size, size),
                f"{patches} has patches of {sides}, but patch_size is {size} by config.json.",
            )


def pretrained_windows(settings: Settings, config: SwinConfig) -> tuple[int, ...] | None:
    """Returns the window sizes of the first training; None: those of `config`.

    0 in a config.json means that the stage was first trained with the windows that it has.
    """
    name = "pretrained_window_sizes"
    sizes = check_value(tuple[int, ...] | None, settings.get(name), name)
    if not sizes or not any(sizes):
        return None
    require(
        len(sizes) == len(config.depths),
        f"{name} is {[*sizes]}; give {len(config.depths)} numbers, one for each stage.",
    )
    return tuple(size or own for size, own in zip(sizes, config.window_sizes, strict=True))


def transformers_swin(architecture: str, version: dict[str, Any]) -> TransformersSwin:
    """Returns the family of `architecture`; `version` has the options that its models share."""
    name = architecture.lower()
    block = f"{name}.encoder.layers.{{s}}.blocks.{{i}}"
    attention = f"{block}.attention"
    layers: Layers = {
        "embed.stem.conv": f"{name}.embeddings.patch_embeddings.projection",
        "embed_norm": f"{name}.embeddings.norm",
        f"{MERGE}.{{norm}}": f"{name}.encoder.layers.{{p}}.downsample.norm",
        f"{MERGE}.reduction": f"{name}.encoder.layers.{{p}}.downsample.reduction",
        f"{BLOCK}.norm1": f"{block}.layernorm_before",
        f"{BLOCK}.attention.attention.qkv": tuple(
            f"{attention}.self.{part}" for part in ("query", "key", "value")
        ),
        f"{BLOCK}.attention.attention.output": f"{attention}.output.dense",
        f"{BLOCK}.norm2": f"{block}.layernorm_after",
        f"{BLOCK}.feedforward.up": f"{block}.intermediate.dense",
        f"{BLOCK}.feedforward.down": f"{block}.output.dense",
        "norm": f"{name}.layernorm",
        "head.linear": "classifier",
    }
    mlp = f"{attention}.self.continuous_position_bias_mlp"
    tensors = {
        f"{BLOCK}.attention.bias.table": f"{attention}.self.relative_position_bias_table",
        f"{BLOCK}.attention.bias.up": f"{mlp}.0.weight",
        f"{BLOCK}.attention.bias.up_bias": f"{mlp}.0.bias",
        f"{BLOCK}.attention.bias.down": f"{mlp}.2.weight",
        f"{BLOCK}.attention.attention.log_scale": f"{attention}.self.logit_scale",
        f"{BLOCK}.attention.attention.qkv.q_bias": f"{attention}.self.query.bias",
        f"{BLOCK}.attention.attention.qkv.v_bias": f"{attention}.self.value.bias",
    }
    return TransformersSwin(
        name=name,
        architecture=architecture,
        layers=layers,
        tensors=tensors,
        fixed=version,
        prefix=f"{name}.",
    )


# Their Swinv2 adds the mask of shifted windows twice; both masks leave a weight of 0, unless scores
# differ by 100 or more, as only very narrow heads with the largest scale may have them.
SWIN = transformers_swin("Swin", FIRST_VERSION)
SWINV2 = transformers_swin("Swinv2", SECOND_VERSION)
BY_MODEL_TYPE: dict[str, TransformersSwin] = {"swin": SWIN, "swinv2": SWINV2}
