"""The networks of the tasks: how each is built, resized, run, and made of parts."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import StackConfig
from modules.models.bert import BERT_PRESETS, BertClassifier, BertConfig, BertMaskedLM
from modules.models.gpt import DECODER_PRESETS, IMAGEGPT_PRESETS, Decoder, DecoderConfig
from modules.models.images import IMAGE_PRESETS, ImageConfig, build_image_net, config_class
from modules.models.mae import MAE_PRESETS, MAEConfig, MaskedAutoencoder
from modules.models.seq2seq import ARCHITECTURES, SEQ2SEQ_PRESETS, Seq2SeqConfig
from modules.models.swin import SwinConfig
from modules.pooling import POOLINGS
from modules.position import build_position
from tasks.errors import UsageError
from tasks.profiling import parts
from tasks.profiling.formulas import Part
from tasks.profiling.swin_parts import swin_parts

# The first pattern that is found in the name of a parameter or of a module decides.
PART_PATTERNS = {
    r"^embed\.stem": "patch embedding",
    r"^merge\.": "patch merging",
    r"^(head|distillation_head|unembed|sentence)\.": "head",
    r"^pooler\.": "pooler",
    r"^pool\.": "pooling",
    r"^(source_)?embed\.": "token embedding",
    r"^segment\.": "segments",
    r"position\.": "positions",
    r"^prefix\.": "class token",
    r"^project_(in|out)\.": "embedding projection",
    r"^project\.": "embedding",
    r"^mask_token\.": "mask token",
    r"attention\.(q|k)_norm\.|^(embed_)?norm\.|stack\.norm\.": "norms",
    r"(norm1|norm2|cross_norm)\.": "norms",
    r"cross_attention\.(query|key_value|output)\.": "cross-attention projections",
    r"attention\.bias\.": "relative bias",
    r"attention\.(qkv|output)\.": "attention projections",
    r"cross_attention\.": "cross-attention scores",
    r"attention\.": "attention scores",
    r"token_mixing\.": "token mixing",
    r"feedforward\.": "feed-forward",
    r"(conv1|conv2)\.": "convolutions",
    r"(residual1|residual2|cross_residual)\.scale\.": "layer scale",
}


def part_name(name: str, config: Any) -> str | None:
    """The part that a parameter or a module belongs to, by its name; None: none.

    Parts of an encoder-decoder begin with "encoder" or "decoder", those of a Swin with "stage 1",
    and those of a masked autoencoder's decoder with "decoder".
    """
    side = ""
    stage = re.match(r"stages\.(\d+)\.", name)
    if stage:
        name = name[stage.end() :]
        side = f"stage {int(stage[1]) + 1} "
    first, _, rest = name.partition(".")
    if first in ("encoder", "decoder"):
        name = rest
        side = f"{first} " if hasattr(config, "decoder") else ""
    for pattern, part in PART_PATTERNS.items():
        if re.search(pattern, f"{name}."):
            return side + part
    return None


@dataclass(frozen=True)
class Network:
    """The networks of a task.

    Args:
        kind: From options of the network to the class of its config.
        presets: Configs by name.
        build: From a config to the network.
        parts: From a config and the length to its parts, and the sizes in their formulas.
        inputs: From a config, batch, length and device to the arguments of the network.
        outputs: From the network and its arguments to logits.
        loss: From the network and its arguments to the loss of a training step.
        fill: From a config, vocabulary and length to one that can be built.
        length: From a config to its context, in tokens, or to the side of its images, in pixels.
    """

    kind: Callable[[Mapping[str, Any]], Any]
    presets: dict[str, Any]
    build: Callable[[Any], nn.Module]
    parts: Callable[[Any, int], tuple[list[Part], dict[str, int]]]
    inputs: Callable[[Any, int, int, torch.device | str], tuple[Tensor, ...]]
    outputs: Callable[..., Tensor]
    loss: Callable[..., Tensor]
    fill: Callable[[Any, int, int], Any]
    length: Callable[[Any], int | None]


# Inputs, outputs and losses -----------------------------------------------------------------------


def vit_inputs(
    config: ImageConfig, batch: int, length: int, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Images (B, C, H, W)."""
    return (torch.zeros(batch, config.channels or 3, length, length, device=device),)


def hidden_inputs(
    config: MAEConfig, batch: int, length: int, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Images (B, C, H, W), and numbers of visible patches (B, K) and of masked ones (B, M)."""
    patches = torch.arange(config.num_patches, device=device).expand(batch, -1)  # (B, N)
    visible = config.visible_patches
    return (*vit_inputs(config, batch, length, device), patches[:, :visible], patches[:, visible:])


def text_inputs(
    config: Any, batch: int, length: int, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Tokens (B, T)."""
    return (torch.ones(batch, length, dtype=torch.long, device=device),)


def masked_inputs(
    config: BertConfig, batch: int, length: int, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Tokens (B, T), and the positions of those that are masked, (S,)."""
    count = batch * parts.masked_tokens(length)
    where = torch.arange(count, device=device)
    return (*text_inputs(config, batch, length, device), where)


def pair_inputs(
    config: Seq2SeqConfig, batch: int, length: int, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Tokens of source and target, (B, T) each."""
    return text_inputs(config, batch, length, device) * 2


def class_loss(net: nn.Module, inputs: Tensor) -> Tensor:
    logits = net(inputs)  # (B, K)
    return F.cross_entropy(logits, torch.zeros_like(logits[:, 0], dtype=torch.long))


def pixel_loss(net: MaskedAutoencoder, images: Tensor, kept: Tensor, masked: Tensor) -> Tensor:
    return net.loss(net(images, kept, masked), images, masked)


def masked_outputs(net: BertMaskedLM, tokens: Tensor, where: Tensor) -> Tensor:
    """Logits (S, V), and (B, 2) of the next sentence, which are added to them."""
    hidden = net.hidden(tokens)
    logits = net.head(hidden.flatten(0, 1)[where])  # (B, T, E) -> (S, V)
    return logits + net.sentence_logits(hidden).mean() if net.config.next_sentence else logits


def masked_loss(net: BertMaskedLM, tokens: Tensor, where: Tensor) -> Tensor:
    hidden = net.hidden(tokens)
    loss = net.loss(hidden, where.new_ones(len(where)), where)[0]
    if net.config.next_sentence:
        logits = net.sentence_logits(hidden)  # (B, 2)
        loss = loss + F.cross_entropy(logits, tokens[:, 0])
    return loss


def token_outputs(net: Any, *inputs: Tensor) -> Tensor:
    """Logits (B, T, V)."""
    return net.logits(net(*inputs))


def token_loss(net: Any, *inputs: Tensor) -> Tensor:
    return net.loss(net(*inputs), inputs[-1])[0]


# Sizes --------------------------------------------------------------------------------------------


def image_parts(config: ImageConfig, length: int) -> parts.Parts:
    if isinstance(config, SwinConfig):
        return swin_parts(config, length)
    return parts.vit_parts(config, length)


def fill_vit(config: ImageConfig, vocabulary: int, length: int) -> ImageConfig:
    """A length is the side of the images, in pixels."""
    classes = config.num_classes or 1000
    return replace(config, channels=config.channels or 3, num_classes=classes, image_size=length)


def fill_bert(config: BertConfig, vocabulary: int, length: int) -> BertConfig:
    return replace(
        config,
        vocabulary=config.vocabulary or vocabulary,
        num_classes=config.num_classes or 2,
    )


def fill_classifier(config: BertConfig, vocabulary: int, length: int) -> BertConfig:
    """Raises `ValueError` for a text that is too long for the pooling."""
    if length > config.max_length and not POOLINGS[config.pool].any_length:
        raise ValueError(
            f"{length} tokens exceed the {config.max_length} that --model.net.pool {config.pool} "
            "takes: give fewer, or raise --model.net.max_length"
        )
    return fill_bert(config, vocabulary, length)


def fill_decoder(config: DecoderConfig, vocabulary: int, length: int) -> DecoderConfig:
    return replace(
        config,
        vocabulary=config.vocabulary or vocabulary,
        max_length=config.max_length or length,
    )


def fill_pixels(config: DecoderConfig, vocabulary: int, length: int) -> DecoderConfig:
    """The token that starts an image is not predicted, unless the table is tied."""
    config = fill_decoder(config, vocabulary, length)
    outputs = None if config.tied or not config.vocabulary else config.vocabulary - 1
    return replace(config, output_vocabulary=outputs)


def fill_pairs(config: Seq2SeqConfig, vocabulary: int, length: int) -> Seq2SeqConfig:
    return replace(
        config,
        source_vocabulary=config.source_vocabulary or vocabulary,
        target_vocabulary=config.target_vocabulary or vocabulary,
        max_length=config.max_length or length,
    )


def resized_stack(stack: StackConfig, width: int | None, depth: int | None) -> StackConfig:
    """Blocks of another width, with heads as wide as before, or of another depth."""
    if depth is not None:
        stack = replace(stack, depth=depth)
    if width is None:
        return stack
    head_dim = stack.resolved.head_dim
    heads, rest = divmod(width * stack.heads, stack.width)
    if stack.order == "mixer":
        heads, rest = stack.heads, 0  # which it does not use
    groups = stack.heads // stack.resolved.kv_heads
    if rest or heads == 0 or heads % groups:
        step = stack.width * groups // stack.heads
        raise UsageError(
            f"--widths {width}: heads stay {head_dim} wide, so give multiples of {step}"
        )
    hidden = {name: getattr(stack, name) for name in ("mlp_width", "token_mlp_width")}
    return replace(
        stack,
        width=width,
        heads=heads,
        kv_heads=None if stack.kv_heads is None else heads // groups,
        context_width=None if stack.context_width is None else width,
        **{name: size and max(1, size * width // stack.width) for name, size in hidden.items()},
    )


def resized(config: Any, width: int | None = None, depth: int | None = None) -> Any:
    """A config of another width or depth, that of its `main_stacks`."""
    stacks = main_stacks(config)
    return replace(config, **{n: resized_stack(s, width, depth) for n, s in stacks.items()})


def main_stacks(config: Any) -> dict[str, StackConfig]:
    """Both sides of an encoder-decoder; of a masked autoencoder the encoder, else all blocks."""
    names = ("stack",) if hasattr(config, "stack") else ("encoder", "decoder")
    return {name: getattr(config, name) for name in names}


def check_length(config: Any, length: int) -> None:
    """Raises `ValueError` if a text of `length` tokens has no positions."""
    if hasattr(config, "image_size"):
        replace(config, image_size=length)
        return
    stack = config.decoder if isinstance(config, Seq2SeqConfig) else config.stack
    limit = config.max_length or length
    with torch.device("meta"):
        position = build_position(config.position, config.position_options, stack, (limit,))
    position.check_length(length)


NETWORKS: dict[str, Network] = {
    "vit": Network(
        config_class,
        IMAGE_PRESETS,
        build_image_net,
        image_parts,
        vit_inputs,
        nn.Module.__call__,
        class_loss,
        fill_vit,
        lambda config: config.image_size,
    ),
    "mae": Network(
        lambda net: MAEConfig,
        MAE_PRESETS,
        MaskedAutoencoder,
        parts.autoencoder_parts,
        hidden_inputs,
        nn.Module.__call__,
        pixel_loss,
        fill_vit,
        lambda config: config.image_size,
    ),
    "bert": Network(
        lambda net: BertConfig,
        BERT_PRESETS,
        BertClassifier,
        parts.classifier_parts,
        text_inputs,
        nn.Module.__call__,
        class_loss,
        fill_classifier,
        lambda config: config.max_length,
    ),
    "mlm": Network(
        lambda net: BertConfig,
        BERT_PRESETS,
        BertMaskedLM,
        parts.masked_parts,
        masked_inputs,
        masked_outputs,
        masked_loss,
        fill_bert,
        lambda config: config.max_length,
    ),
    "lm": Network(
        lambda net: DecoderConfig,
        DECODER_PRESETS,
        Decoder,
        parts.decoder_parts,
        text_inputs,
        token_outputs,
        token_loss,
        fill_decoder,
        lambda config: config.max_length,
    ),
    "igpt": Network(
        lambda net: DecoderConfig,
        IMAGEGPT_PRESETS,
        Decoder,
        parts.decoder_parts,
        text_inputs,
        token_outputs,
        token_loss,
        fill_pixels,
        lambda config: config.max_length,
    ),
    "seq2seq": Network(
        lambda net: Seq2SeqConfig,
        SEQ2SEQ_PRESETS,
        lambda config: ARCHITECTURES[config.architecture](config),
        parts.pair_parts,
        pair_inputs,
        token_outputs,
        token_loss,
        fill_pairs,
        lambda config: config.max_length,
    ),
}
DEFAULTS = {
    "lm": (50257, 1024),
    "igpt": (513, 1024),
    "bert": (30522, 512),
    "mlm": (30522, 512),
    "seq2seq": (37000, 128),
}
