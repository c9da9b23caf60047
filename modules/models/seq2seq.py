"""Encoder-decoders (Vaswani 2017) and prefix language models: source sequence in, target out."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from modules.cache import NO_CACHE, StackCache, TokenPositions
from modules.config import StackConfig
from modules.embedding import TokenEmbedding, initialise_table
from modules.kernels.dropout import Dropout
from modules.kv_cache import KVCache
from modules.lm_heads import NextTokenModel, TokenHead
from modules.masks import Mask, padding, prefix
from modules.models.seq2seq_config import SEQ2SEQ_PRESETS, Seq2SeqConfig
from modules.norm import norm_factory
from modules.position import build_position
from modules.transformer import NO_CONTEXT, Context, Stack

__all__ = ["ARCHITECTURES", "SEQ2SEQ_PRESETS", "PrefixLM", "Seq2Seq", "Seq2SeqConfig"]


class TextStack(nn.Module):
    """Position encoding, norm, dropout and blocks of one side, with `length` learned positions."""

    def __init__(self, config: Seq2SeqConfig, stack: StackConfig, length: int) -> None:
        super().__init__()
        self.position = build_position(config.position, config.position_options, stack, (length,))
        norm = norm_factory(stack)
        self.norm = norm(stack.width) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.stack = Stack(stack)

    def forward(
        self,
        x: Tensor,
        positions: TokenPositions,
        mask: Mask,
        context: Context = NO_CONTEXT,
        cache: StackCache = NO_CACHE,
    ) -> Tensor:
        """(B, N, E) -> (B, N, E), for tokens at `positions`.

        Other arguments as in `Stack.forward`.
        """
        new = positions.new
        mask = mask.with_bias(self.position.bias(new, positions.all))
        x = self.norm(self.position.embed(x, None if positions.in_order else new))
        return self.stack(self.dropout(x), mask, self.position.rotate(new), context, cache)


class Seq2Seq(NextTokenModel):
    """Source sequences to contextual vectors, and targets to scores of the next token.

    Raises `ValueError` if a vocabulary or `max_length` of the config is null.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        if None in (config.source_vocabulary, config.target_vocabulary, config.max_length):
            raise ValueError("A vocabulary or max_length is null; fill all in from the data first.")
        self.config = config
        self.max_length: int = config.max_length  # type: ignore[assignment]
        self.source_vocabulary: int = config.source_vocabulary  # type: ignore[assignment]
        self.vocabulary: int = config.target_vocabulary  # type: ignore[assignment]
        self.embed = self.make_embedding(self.vocabulary, config.scale_embedding)
        self.source_embed = None
        if config.tying in ("target", "none"):
            self.source_embed = self.make_embedding(self.source_vocabulary, config.scale_embedding)
        self.unembed = None
        if config.tying in ("inputs", "none"):
            self.unembed = self.make_embedding(self.vocabulary, False)
        table = self.embed if self.unembed is None else self.unembed
        self.head = TokenHead(table, config.output_bias)
        self.build_stacks(self.max_length)

    def make_embedding(self, vocabulary: int, scale: bool) -> TokenEmbedding:
        """An embedding, times sqrt(E) if `scale`; std is 1 / sqrt(E) with `scale_embedding`."""
        stack = self.config.decoder
        embedding = TokenEmbedding(vocabulary, stack.width, scale)
        initialise_table(embedding, self.config.scale_embedding, stack)
        return embedding

    def build_stacks(self, length: int) -> None:
        """Makes encoder and decoder, with `length` learned positions each."""
        self.encoder = TextStack(self.config, self.config.encoder, length)
        self.decoder = TextStack(self.config, self.config.decoder, length)

    def forward(
        self,
        source: Tensor,
        tokens: Tensor,
        source_padding_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Teacher forcing: what follows each token of the target, given the source.

        Args:
            source: Integers (B, M).
            tokens: Integers (B, N): the targets moved right, beginning with the start token.
            source_padding_mask: As `padding_mask` of `encode`.
            padding_mask: As `padding_mask` of `decode`.

        Returns:
            (B, N, E); values at padding are undefined.
        """
        return self.decode(tokens, self.encode(source, source_padding_mask), padding_mask)

    def encode(
        self, source: Tensor, padding_mask: Tensor | None = None, record: StackCache = NO_CACHE
    ) -> Context:
        """Encodes source sequences.

        Args:
            source: Integers (B, M).
            padding_mask: Boolean (B, M), False at padding, on the right; None: there is none.
            record: Collects the attention weights of each block.

        Returns:
            What `decode` attends to: states (B, M, E), and their mask.

        Raises:
            ValueError: More tokens than learned positions.
        """
        mask = padding(padding_mask)
        positions = NO_CACHE.add_tokens(source, None, None)
        states = self.encoder(self.embed_source(source), positions, mask, cache=record)
        return Context(states, mask)

    def embed_source(self, source: Tensor) -> Tensor:
        """Tokens of source sequences (B, M) -> their vectors (B, M, E)."""
        embed = self.embed if self.source_embed is None else self.source_embed
        return embed(source)

    def decode(
        self,
        tokens: Tensor,
        context: Context,
        padding_mask: Tensor | None = None,
        cache: StackCache = NO_CACHE,
    ) -> Tensor:
        """Runs the decoder on target sequences.

        Args:
            tokens: Integers (B, N), beginning with the start token unless they continue a cache.
            context: Made by `encode`.
            padding_mask: Boolean (B, N), False at padding, which does not count as a position;
                None: there is none, or only on the right, where no token attends to it.
            cache: Made by `make_cache`: the tokens also attend to those in it, and are appended.
                Or a record of attention weights.

        Returns:
            (B, N, E); values at padding are undefined.

        Raises:
            ValueError: More tokens than learned positions or than the cache has room for.
        """
        positions = cache.add_tokens(tokens, padding_mask, None)
        mask = positions.mask(padding_mask)
        return self.decoder(self.embed(tokens), positions, mask, context, cache)

    def make_cache(self, context: Context, length: int) -> KVCache:
        """A cache for targets of up to `length` tokens, one for each source.

        Raises `ValueError` if `length` is more than there are learned positions.
        """
        length += self.prefix_length(context)
        self.decoder.position.check_length(length)
        stack = self.decoder.stack.config
        return KVCache.like(self.embed.weight, stack, len(context.states), length)

    def prefix_length(self, context: Context) -> int:
        """Number of tokens in the decoder's blocks before the target."""
        return 0


class PrefixLM(Seq2Seq):
    """One stack for the source, then the target (Raffel 2020, section 3.2.1).

    Source tokens attend to each other, target tokens to the source and to earlier ones. Arguments
    and methods as `Seq2Seq`; `encode` embeds only.
    """

    def build_stacks(self, length: int) -> None:
        """Makes one stack for source and target in a row, of up to `length` tokens each."""
        stack = replace(
            self.config.decoder, causal=False, cross_attention=False, context_width=None
        )
        self.decoder = TextStack(self.config, stack, 2 * length)

    def encode(
        self, source: Tensor, padding_mask: Tensor | None = None, record: StackCache = NO_CACHE
    ) -> Context:
        """Embeds the source only; `decode` puts the embeddings before those of the target."""
        return Context(self.embed_source(source), padding(padding_mask))

    def decode(
        self,
        tokens: Tensor,
        context: Context,
        padding_mask: Tensor | None = None,
        cache: StackCache = NO_CACHE,
    ) -> Tensor:
        """As `Seq2Seq.decode`; positions count on from the source's last token."""
        x = self.embed(tokens)  # (B, N, E)
        first = 0
        if cache.length == 0:
            first = self.prefix_length(context)
            padding_mask = join_padding(context, padding_mask, tokens)  # (B, M + N)
            x = torch.cat((context.states, x), 1)  # (B, M + N, E)
        positions = cache.add_tokens(x[..., 0], padding_mask, None)
        mask = positions.mask(padding_mask)
        if first:
            mask = mask & prefix(first, x.shape[1], x.device)
        elif x.shape[1] > 1:  # a single new token has no later ones
            mask = mask & cache.causal_mask(x.shape[1], x.device)
        return self.decoder(x, positions, mask, cache=cache)[:, first:]

    def prefix_length(self, context: Context) -> int:
        """Number of tokens in the decoder's blocks before the target."""
        return context.states.shape[1]


def join_padding(context: Context, padding_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Padding mask of a source and of its target (B, N): boolean (B, M + N).

    None: there is no padding.
    """
    allowed = context.mask.allowed  # (B, 1, 1, M)
    if allowed is None and padding_mask is None:
        return None
    if allowed is not None and context.mask.fully_masked is not None:
        allowed = allowed & ~context.mask.fully_masked
    length = context.states.shape[1]
    shape = (tokens.shape[0], length + tokens.shape[1])
    both = torch.ones(shape, dtype=torch.bool, device=tokens.device)  # (B, M + N)
    if allowed is not None:
        both[:, :length] = allowed[:, 0, 0]
    if padding_mask is not None:
        both[:, length:] = padding_mask
    return both


ARCHITECTURES: dict[str, type[Seq2Seq]] = {"encoder_decoder": Seq2Seq, "prefix": PrefixLM}
