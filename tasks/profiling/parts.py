"""The parts of each model, by formula.

Sizes are d (width), E (width of embeddings, if not d), T (tokens of a sample), N (learned
positions), V (vocabulary), U (vocabulary of the source), O (tokens that can be predicted, if not
all), K (classes), S (masked tokens), C (channels), P (side of a patch), R (tokens of the encoder),
Q (visible patches) and D (width of the decoder).
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

from modules.config import StackConfig
from modules.models.bert import BertConfig
from modules.models.gpt import DecoderConfig
from modules.models.images import ImageConfig
from modules.models.mae import MAEConfig
from modules.models.seq2seq import Seq2SeqConfig
from modules.models.vit import ViTConfig
from modules.patch_embedding import channel_steps
from modules.pooling import POOLINGS
from tasks.profiling.formulas import Formula, Part, norm_parameters, stack_parts, without_skipped

Parts = tuple[list[Part], dict[str, int]]
MASKED = 0.15  # of the tokens are predicted by a masked language model (Devlin 2019)


def masked_tokens(length: int) -> int:
    """Tokens that are predicted in a sample of `length` tokens."""
    return max(1, round(MASKED * length))


def position_parts(
    position: str, options: dict[str, Any], stack: StackConfig, axes: int = 1
) -> list[Part]:
    """The table of learned positions, or of T5's buckets for each axis."""
    if position == "learned":
        return [Part("positions", Formula({"N d": 1}))]
    if position == "t5":
        buckets = options.get("buckets", 32)
        return [Part("positions", Formula({"": axes * buckets * stack.heads}))]
    return []


def embedding_symbol(config: BertConfig | DecoderConfig) -> str:
    """The symbol for the width of embeddings."""
    return "d" if config.embedding_width in (None, config.stack.width) else "E"


def projection_part(stack: StackConfig, also_back: bool = False) -> Part:
    """A linear map from embeddings to the blocks; `also_back`: another one behind them."""
    parameters = Formula({"E d": 1, "d": stack.bias})
    if also_back:
        parameters += Formula({"E d": 1, "E": stack.bias})
    return Part("embedding projection", parameters, Formula({"T E d": 2 * (1 + also_back)}))


def pooling_parts(pool: str) -> list[Part]:
    """Attention from one learned query to T tokens, a mean by learned weights, or a linear map."""
    if pool == "sequence":
        return [Part("pooling", Formula({"d": 1}), Formula({"T d": 4}))]
    if pool == "flatten":
        return [Part("pooling", Formula({"N d²": 1, "d": 1}), Formula({"N d²": 2}))]
    if pool != "attention":
        return []
    flops = Formula({"T d²": 4, "d²": 4, "T d": 4})
    return [Part("pooling", Formula({"d²": 4, "d": 5}), flops)]


def patch_parts(config: ViTConfig) -> Parts:
    """Parts of a Vision Transformer but pooling and head; patches count as positions."""
    patches = math.prod(config.grid)
    stack = config.stack
    if config.norm_after_pool:
        stack = replace(stack, final_norm=False)
    sizes = {
        "d": stack.width,
        "T": patches + config.prefix_tokens,
        "N": patches,
        "C": config.channels or 3,
        "P": config.patch_size,
    }
    positions = position_parts(config.position, config.position_options, stack, axes=2)
    found = [stem_part(config), *positions]
    if config.prefix_tokens:
        found.append(Part("class token", Formula({"d": config.prefix_tokens})))
    return [*found, *stack_parts(stack)], sizes


def vit_parts(config: ViTConfig, length: int) -> Parts:
    """Parts of a Vision Transformer or MLP-Mixer for images of `length` pixels."""
    found, sizes = patch_parts(replace(config, image_size=length))
    sizes["K"] = config.num_classes or 1000
    heads = 2 if config.distillation_token else 1
    head = Formula({"K d": 1, "K": 1})
    if config.norm_after_pool:
        head += norm_parameters(config.stack)
    found = without_skipped(found, config.stack, config.num_read)
    found += [part.renamed("T", "N") for part in pooling_parts(config.pool)]
    return [*found, Part("head", head * heads, Formula({"K d": 2 * heads}))], sizes


def autoencoder_parts(config: MAEConfig, length: int) -> Parts:
    """Parts of a masked autoencoder for images of `length` pixels (He 2022).

    The encoder has R tokens, Q of them visible patches, and the decoder T, of which it predicts S.
    """
    config = replace(config, image_size=length)
    encoder, sizes = patch_parts(config)
    stack = config.decoder
    sizes |= {
        "R": config.prefix_tokens + config.visible_patches,
        "Q": config.visible_patches,
        "D": stack.width,
        "S": config.num_patches - config.visible_patches,
    }
    decoder = [
        Part("mask token", Formula({"d": 1})),
        *position_parts(config.position, config.position_options, stack, axes=2),
        *without_skipped(stack_parts(stack), stack, config.prefix_tokens + sizes["S"]),
        Part("head", Formula({"C P² d": 1, "C P²": 1}), Formula({"S C P² d": 2})),
    ]
    if config.stem == "patch":  # other stems compute all patches
        encoder[0] = encoder[0].renamed("N", "Q")
    return [
        *(part.renamed("T", "R") for part in encoder),
        Part("decoder embedding", Formula({"d D": 1, "D": 1}), Formula({"R d D": 2})),
        *(replace(part.renamed("d", "D"), name=f"decoder {part.name}") for part in decoder),
    ], sizes


def stem_part(config: ImageConfig) -> Part:
    """From pixels to N vectors; of stems of several convolutions only sums of numbers."""
    if config.stem == "patch":
        flops = Formula({"N C P² d": 2})
        return Part("patch embedding", Formula({"C P² d": 1, "d": 1}), flops, fixed_inputs=flops)
    count = {"cct": count_cct_stem, "hybrid": count_hybrid_stem}.get(config.stem, count_conv_stem)
    parameters, products = count(config, config.channels or 3, config.stack.width)
    return Part(
        "patch embedding",
        Formula({"": parameters}),
        Formula({"": sum(products)}),
        fixed_inputs=Formula({"": products[0]}),
    )


def count_cct_stem(config: ImageConfig, channels: int, width: int) -> tuple[int, list[int]]:
    """Parameters, and FLOP of each convolution."""
    steps = config.patch_size.bit_length() - 1
    pairs = [*pairwise([channels, *[64] * (steps - 1), width])]
    sides = [config.image_size // 2**step for step in range(steps)]
    weights = [9 * before * after for before, after in pairs]
    products = [2 * count * side**2 for count, side in zip(weights, sides, strict=True)]
    return sum(weights), products


def count_hybrid_stem(config: ImageConfig, channels: int, width: int) -> tuple[int, list[int]]:
    """Parameters, and FLOP of each convolution."""
    first = 49 * channels * 64
    patches = 64 * (config.patch_size // 4) ** 2 * width
    products = [2 * first * (config.image_size // 2) ** 2, 2 * patches * math.prod(config.grid)]
    return first + 2 * 64 + patches + width, products


def count_conv_stem(config: ImageConfig, channels: int, width: int) -> tuple[int, list[int]]:
    """Parameters, and FLOP of each convolution."""
    side = config.image_size
    parameters = 0
    products: list[int] = []
    for before, after in pairwise(channel_steps(channels, width, config.patch_size)):
        pixels = (side // 2) ** 2 if config.stem == "conv" else side**2
        parameters += 9 * before * after + 2 * after
        products.append(2 * 9 * before * after * pixels)
        side //= 2
        if config.stem == "resnet":
            parameters += 9 * after * after + 2 * after
            products.append(2 * 9 * after * after * side**2)
    if config.stem == "conv":
        parameters += after * width + width
        products.append(2 * after * width * side**2)
    return parameters, products


def encoder_parts(config: BertConfig, length: int) -> Parts:
    """Parts of BERT's encoder for texts of `length` tokens."""
    stack = config.stack
    symbol = embedding_symbol(config)
    sizes = {
        "d": stack.width,
        "E": config.embedding_width or stack.width,
        "T": length,
        "N": config.max_length,
        "V": config.vocabulary or 0,
        "K": config.num_classes or 2,
        "S": masked_tokens(length),
    }
    found = [Part("token embedding", Formula({"V d": 1}))]
    if config.segments:
        found.append(Part("segments", Formula({"d": config.segments})))
    found += position_parts(config.position, config.position_options, stack)
    found = [part.renamed("d", symbol) for part in found]
    if symbol == "E":
        found.append(projection_part(stack))
    once = norm_parameters(stack).renamed("d", symbol) if config.embedding_norm else Formula()
    return [*found, *stack_parts(stack, once=once)], sizes


def classifier_parts(config: BertConfig, length: int) -> Parts:
    """Parts of a classifier of texts of `length` tokens."""
    found, sizes = encoder_parts(config, length)
    found = without_skipped(found, config.stack, POOLINGS[config.pool].num_read)
    found += pooling_parts(config.pool)
    if config.pooler != "none":
        found.append(Part("pooler", Formula({"d²": 1, "d": 1}), Formula({"d²": 2})))
    return [*found, Part("head", Formula({"K d": 1, "K": 1}), Formula({"K d": 2}))], sizes


def masked_parts(config: BertConfig, length: int) -> Parts:
    """Parts of a masked language model, which predicts S of `length` tokens."""
    found, sizes = encoder_parts(config, length)
    stack = config.stack
    symbol = embedding_symbol(config)
    square = "d²" if symbol == "d" else "E d"
    vectors = Formula({"d": stack.bias}) + norm_parameters(stack)
    head = Formula({square: 1, "V": 1}) + vectors.renamed("d", symbol)
    flops = Formula({f"S V {symbol}": 2, f"S {square}": 2})
    if config.next_sentence:
        found.append(Part("pooler", Formula({"d²": 1, "d": 1}), Formula({"d²": 2})))
        head += Formula({"d": 2, "": 2})
        flops += Formula({"d": 4})
    return [*found, Part("head", head, flops)], sizes


def decoder_parts(config: DecoderConfig, length: int) -> Parts:
    """Parts of a decoder for texts of `length` tokens."""
    stack = config.stack
    sizes = {
        "d": stack.width,
        "T": length,
        "N": config.max_length or length,
        "V": config.vocabulary or 0,
    }
    outputs = "V"
    if config.output_vocabulary is not None:
        outputs = "O"
        sizes["O"] = config.output_vocabulary
    found = [
        Part("token embedding", Formula({"V d": 1})),
        *position_parts(config.position, config.position_options, stack),
    ]
    symbol = embedding_symbol(config)
    if symbol == "E":
        sizes["E"] = config.embedding_width or stack.width
        found = [part.renamed("d", symbol) for part in found]
        found.append(projection_part(stack, also_back=config.tied))
    inner = symbol if config.tied else "d"
    head = Formula({f"{outputs} d": 0 if config.tied else 1})
    return [
        *found,
        *stack_parts(stack),
        Part("head", head, Formula({f"T {outputs} {inner}": 2})),
    ], sizes


def pair_parts(config: Seq2SeqConfig, length: int) -> Parts:
    """Parts of an encoder-decoder or prefix model; source and target have `length` tokens each."""
    sizes = {
        "d": config.decoder.width,
        "T": length,
        "N": config.max_length or length,
        "V": config.target_vocabulary or 0,
        "U": config.source_vocabulary or 0,
    }
    tables = Formula({"V d": 1})
    if config.tying in ("target", "none"):
        tables += Formula({"U d": 1})
    found = [Part("token embedding", tables)]
    is_prefix = config.architecture == "prefix"
    sides = {"decoder": config.decoder}
    if is_prefix:
        decoder = replace(config.decoder, causal=False, cross_attention=False, context_width=None)
        sides = {"decoder": decoder}
    else:
        sides = {"encoder": config.encoder, "decoder": config.decoder}
    for side, stack in sides.items():
        once = norm_parameters(stack) if config.embedding_norm else Formula()
        both = position_parts(config.position, config.position_options, stack)
        if is_prefix and config.position == "learned":
            both = [replace(part, parameters=part.parameters * 2) for part in both]
        both += stack_parts(stack, 2 if is_prefix else 1, once)
        found += [replace(part, name=f"{side} {part.name}") for part in both]
    head = Formula({"V d": config.tying in ("inputs", "none"), "V": config.output_bias})
    return [*found, Part("head", head, Formula({"T V d": 2}))], sizes


def kv_cache_values(config: Any) -> int:
    """Values that a decoder keeps for each token: keys and values of G heads in L blocks."""
    stack = config.decoder if isinstance(config, Seq2SeqConfig) else config.stack
    sizes = stack.resolved
    return stack.depth * sizes.kv_heads * (sizes.head_dim + sizes.value_dim)
