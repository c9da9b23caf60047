"""Encoder-decoders of Hugging Face: what Marian, BART and T5 share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from modules.config import StackConfig, require
from modules.models.seq2seq import Seq2Seq, Seq2SeqConfig
from modules.models.seq2seq_config import TyingName
from modules.pretrained.family import TransformersFamily
from modules.pretrained.settings import (
    Settings,
    build_config,
    check_aliases,
    check_feedforward,
    check_fixed_options,
    check_heads,
    check_position_options,
    check_settings,
    check_values,
    get_option,
    read_options,
    write_options,
)
from modules.pretrained.weights import Layers, Names, State, weight_names
from modules.schema import check_value

HEAD = "lm_head"
BIAS = "final_logits_bias"
SIDES: dict[str, Settings] = {"encoder": {}, "decoder": {"causal": True, "cross_attention": True}}
POSITION_OPTIONS = {"base": 10000, "buckets": 32, "max_distance": 128}
DROPOUTS = ("dropout", "attention_dropout", "mlp_dropout")
MODEL_OPTIONS = {field.name for field in fields(Seq2SeqConfig)}


@dataclass(frozen=True, kw_only=True)
class Seq2SeqFamily(TransformersFamily[Seq2SeqConfig]):
    """One of the families; arguments as `TransformersFamily`, `layers` outside of blocks, and:

    Args:
        block: Their name of a block; "{side}" stands for encoder or decoder.
        blocks: "encoder" and "decoder" -> names of layers in a block.
        side_options: "encoder" and "decoder" -> their option -> ours, if the two may differ.
        stack_fixed: Options of both stacks that all models of the family have.
        tying_options: Their options that say which tables are tied.
        tying: Values of those -> ours.
        tying_defaults: Values of those if the file does not say.
    """

    block: str
    blocks: dict[str, Layers]
    side_options: dict[str, dict[str, str]]
    stack_fixed: Settings
    tying_options: tuple[str, ...]
    tying: dict[tuple[bool, ...], TyingName]
    tying_defaults: dict[str, bool] = field(default_factory=dict)
    required: tuple[str, ...] = ("source_vocabulary", "width", "heads", "mlp_width")
    unused: str = r"\.version$"
    heads: tuple[str, ...] = (HEAD, BIAS)

    # Weights --------------------------------------------------------------------------------------

    def names(self, config: Seq2SeqConfig) -> Names:
        names = self.token_names(config) | weight_names(self.layers, 1, self.tensors)
        for side, layers in self.blocks.items():
            block = self.block.replace("{side}", side)
            full: Layers = {}
            for ours, theirs in layers.items():
                parts = (theirs,) if isinstance(theirs, str) else theirs
                full[f"{side}.stack.blocks.{{i}}.{ours}"] = tuple(f"{block}.{p}" for p in parts)
            names |= weight_names(full, getattr(config, side).depth)
        return names

    def token_names(self, config: Seq2SeqConfig) -> Names:
        """Returns our names of the tables of tokens with theirs."""
        if config.tying in ("all", "inputs"):
            names: Names = {"embed.weight": (f"{self.prefix}shared.weight",)}
        else:
            names = {
                "source_embed.weight": (f"{self.prefix}encoder.embed_tokens.weight",),
                "embed.weight": (f"{self.prefix}decoder.embed_tokens.weight",),
            }
        if config.tying not in ("all", "target"):
            names["unembed.weight"] = (f"{HEAD}.weight",)
        return names

    def copies(self, config: Seq2SeqConfig) -> dict[str, str]:
        shared = f"{self.prefix}shared.weight"
        copies = {}
        if config.tying in ("all", "inputs"):
            copies[f"{self.prefix}encoder.embed_tokens.weight"] = shared
            copies[f"{self.prefix}decoder.embed_tokens.weight"] = shared
        if config.tying in ("all", "target"):
            copies[f"{HEAD}.weight"] = self.token_names(config)["embed.weight"][0]
        return copies

    def networks(self, config: Seq2SeqConfig) -> list[nn.Module]:
        return [Seq2Seq(config)]

    def complete(self, rest: State, config: Seq2SeqConfig) -> None:
        """Adds an output layer that the file has as the table of tokens, and a bias of zeros."""
        shared = f"{self.prefix}shared.weight"
        if config.tying == "inputs" and shared in rest:
            rest.setdefault(f"{HEAD}.weight", rest[shared])
        if config.output_bias:
            rest.setdefault(BIAS, torch.zeros(1, config.target_vocabulary or 0))

    def weights_to_external(self, state: State, config: Seq2SeqConfig) -> State:
        """As in the base class; a bias that our model lacks is zero."""
        self.check(config)
        if "head.bias" in self.tensors and "head.bias" not in state:
            state = {**state, "head.bias": torch.zeros(config.target_vocabulary or 0)}
        return super().weights_to_external(state, config)

    # Configs --------------------------------------------------------------------------------------

    def config_from_external(self, settings: Settings) -> Seq2SeqConfig:
        check_settings(settings, {"is_encoder_decoder": True, "is_causal": True})
        settings = self.with_defaults(settings)
        options = self.read(settings, StackConfig, Seq2SeqConfig)
        options.setdefault("target_vocabulary", options["source_vocabulary"])
        options.setdefault("attention_dropout", options["dropout"])
        options = {"output_bias": True, **options, **self.stack_fixed}
        options["tying"] = self.read_tying(settings)
        del options["final_norm"]  # follows from the order
        stacks = {}
        for side, names in self.side_options.items():
            sizes = read_options(settings, names, names.values(), StackConfig)
            stacks[side] = sizes | SIDES[side]
        check_aliases(settings, ("depth", "heads"), {**options, **stacks["encoder"]})
        return build_config(Seq2SeqConfig, options, stacks)

    def with_defaults(self, settings: Settings) -> Settings:
        """Returns the config.json with options that follow from others."""
        return settings

    def read_tying(self, settings: Settings) -> TyingName:
        """Returns which tables are tied."""
        values = []
        for name in self.tying_options:
            value = settings.get(name)
            values.append(
                check_value(bool, self.tying_defaults[name] if value is None else value, name)
            )
        pairs = zip(self.tying_options, values, strict=True)
        names = " and ".join(f"{name} {value}" for name, value in pairs)
        known = tuple(values) in self.tying
        require(known, f"{names} is not supported; choose a model that ties its tables otherwise.")
        return self.tying[tuple(values)]

    def config_to_external(
        self, config: Seq2SeqConfig, special_tokens: Mapping[str, int] | None = None
    ) -> Settings:
        """Returns the config.json of a model of ours, without dropout rates that the family lacks.

        `special_tokens` are ids of "decoder_start", "bos", "eos" and "pad", as far as there are
        any. Raises `ValueError` if no model of theirs can equal ours, with the reason.
        """
        self.check(config)
        settings = dict(self.only)
        for theirs, ours in self.options.items():
            source = config if ours in MODEL_OPTIONS else config.encoder
            settings |= write_options(source, {theirs: ours}, self.activations)
        for side, names in self.side_options.items():
            settings |= write_options(getattr(config, side), names, self.activations)
        values = next(values for values, tying in self.tying.items() if tying == config.tying)
        settings |= dict(zip(self.tying_options, values, strict=True))
        settings["tie_word_embeddings"] = config.tying in ("all", "target")
        for role in ("decoder_start", "bos", "eos", "pad"):
            settings[f"{role}_token_id"] = (special_tokens or {}).get(role)
        return settings | {
            "forced_eos_token_id": None,
            "model_type": self.name,
            "architectures": [self.architecture],
            "is_encoder_decoder": True,
        }

    def check(self, config: Seq2SeqConfig) -> None:
        name = self.name
        check_fixed_options(name, config, {"architecture": "encoder_decoder", **self.fixed})
        known = sorted(set(self.tying.values()))
        require(
            config.tying in known,
            f"{name} models have tying {' or '.join(known)}, but this one has {config.tying}.",
        )
        check_position_options(name, config, POSITION_OPTIONS)
        for stack in (config.encoder, config.decoder):
            check_fixed_options(name, stack, self.stack_fixed)
            check_feedforward(name, stack, self.activations)
            if "head_dim" not in self.options.values():
                check_heads(name, stack)
            check_values(name, stack)
            equal = stack.resolved.kv_heads == stack.heads
            require(equal, f"{name} models have as many kv_heads as heads.")
        for option in sorted({*self.options.values()} - MODEL_OPTIONS - {*DROPOUTS}):
            encoder = get_option(config.encoder, option)
            decoder = get_option(config.decoder, option)
            require(
                encoder == decoder,
                f"{name} models have one {option} for both stacks, not {encoder} and {decoder}.",
            )
