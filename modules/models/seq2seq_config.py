"""Sizes and variants of encoder-decoders, and those that were published."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from modules.config import StackConfig, check_choice, check_sizes, require
from modules.position import check_position
from modules.transformer import check_variants

ArchitectureName = Literal["encoder_decoder", "prefix"]
TyingName = Literal["all", "inputs", "target", "none"]


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Sizes and variants of a model that turns a source sequence into a target sequence.

    Args:
        source_vocabulary: Size of the source vocabulary; null: to be filled in from the data.
        target_vocabulary: Size V of the target vocabulary; null: to be filled in from the data.
        max_length: Largest number of tokens of source and of target, with the end token: number of
            learned positions of each side, and length of the longest translation; null: to be
            filled in from the data.
        architecture: Entry of `ARCHITECTURES`; "prefix" has the decoder's blocks only, and switches
            their causal and cross_attention off.
        position: Position encoding of both sides; each has its own weights; an entry of
            `POSITIONS` in modules/position.py: none, learned, sinusoidal, rotary, alibi or t5.
        position_options: Options of that encoding, such as {base: 100}.
        tying: Which embedding matrices are shared: "all" three, of source, target and output
            (Vaswani 2017, section 3.4), the "inputs", that is source and target, "target" and
            output (Press 2017), or "none".
        scale_embedding: Multiply embeddings by sqrt(E) (Vaswani 2017, section 3.4); tables then
            start with std 1 / sqrt(E).
        embedding_norm: A norm after the sum of embedding and position (Lewis 2020).
        output_bias: A learned bias of each token's logit.
        encoder: The blocks of the source.
        decoder: The blocks of the target; causal, with cross-attention.
    """

    source_vocabulary: int | None = None
    target_vocabulary: int | None = None
    max_length: int | None = None
    architecture: ArchitectureName = "encoder_decoder"
    position: str = "sinusoidal"
    position_options: dict[str, Any] = field(default_factory=dict)
    tying: TyingName = "all"
    scale_embedding: bool = True
    embedding_norm: bool = False
    output_bias: bool = False
    encoder: StackConfig = field(default_factory=StackConfig)
    decoder: StackConfig = field(
        default_factory=lambda: StackConfig(causal=True, cross_attention=True)
    )

    def __post_init__(self) -> None:
        check_sizes(self, "source_vocabulary", "target_vocabulary", "max_length")
        check_choice("architecture", self.architecture, get_args(ArchitectureName))
        check_choice("tying", self.tying, get_args(TyingName))
        for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            check_variants(stack, name)
            check_position(
                self.position, self.position_options, stack, grid=(self.max_length or 1,)
            )
        require(
            not (self.encoder.causal or self.encoder.cross_attention),
            "The encoder needs encoder.causal and encoder.cross_attention off.",
        )
        require(
            self.decoder.causal and self.decoder.cross_attention,
            "The decoder needs decoder.causal and decoder.cross_attention on.",
        )
        require(
            self.architecture != "prefix" or self.decoder.conv_kernel is None,
            "A prefix language model has no convolutions, which would read the padding between "
            "source and target; leave decoder.conv_kernel out.",
        )
        require(
            self.encoder.width == self.decoder.width
            and self.decoder.context_width in (None, self.encoder.width),
            f"The encoder is {self.encoder.width} wide and the decoder {self.decoder.width}; give "
            "both the same width, and leave decoder.context_width out.",
        )
        require(
            self.tying not in ("all", "inputs")
            or None in (self.source_vocabulary, self.target_vocabulary)
            or self.source_vocabulary == self.target_vocabulary,
            f'tying "{self.tying}" shares one table, but there are {self.source_vocabulary} source '
            f"tokens and {self.target_vocabulary} target tokens; use one tokenizer for both, "
            'or tying "target".',
        )


def _published(width: int, mlp_width: int, depth: int, heads: int, dropout: float) -> Seq2SeqConfig:
    """The Transformer (Vaswani 2017) of these sizes: post-norm, ReLU, sinusoidal positions."""
    stack = StackConfig(
        width,
        depth,
        heads,
        mlp_width=mlp_width,
        feedforward="relu",
        norm_eps=1e-5,
        order="post",
        dropout=dropout,
        mlp_dropout=0.0,
        init="xavier",
    )
    return Seq2SeqConfig(encoder=stack, decoder=replace(stack, causal=True, cross_attention=True))


SEQ2SEQ_PRESETS: dict[str, Seq2SeqConfig] = {
    "tiny": _published(128, 256, 4, 4, 0.3),  # for small data such as Multi30k; not in the paper
    "base": _published(512, 2048, 6, 8, 0.1),
    "big": _published(1024, 4096, 6, 16, 0.3),
}
