"""Named activations of a network: recorded, or changed, by forward hooks.

The names are those of the modules: of each stack of blocks, "embedding" (what its first block
reads), "blocks.2", "blocks.2.attention", "blocks.2.attention.heads" (what each head adds, before
the output projection), "blocks.2.attention.weights", the same of "cross_attention",
"blocks.2.feedforward", and "hidden" (what the last norm returns); of the network, "logits". Blocks
of an MLP-Mixer have "blocks.2.token_mixing" instead of attention. With the order "res_post" the
norm at the end of a branch belongs to its sub-layer. Names of an encoder-decoder begin with
"encoder." or "decoder.", those of a Swin with "stages.0." and so on; its weights are those of all
tokens of the grid, 0 between windows. Blocks count from 0. Without hooks, a network computes as
usual.
"""

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modules.attention import AttentionCache, MultiHeadAttention, ScoreFunction
from modules.cache import NO_CACHE, StackCache
from modules.masks import Mask
from modules.transformer import ResPostBlock, Stack
from modules.windows import WindowAttention

Change = Callable[[Tensor], Tensor | None]  # gets an activation; None: it stays as it is
Hook = Callable[[Change], RemovableHandle]  # calls a change in each forward pass from now on
SUB_LAYERS = ("attention", "token_mixing", "cross_attention", "feedforward")  # of a block
END_NORMS = {"attention": "norm1", "cross_attention": "cross_norm", "feedforward": "norm2"}


class ObservedCache(AttentionCache):
    """Another attention layer's cache, with a change of the weights."""

    def __init__(self, cache: AttentionCache, change: Change) -> None:
        self.cache = cache
        self.change = change
        self.on_weights = self.observe

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.update(k, v)

    def cached_context(self) -> tuple[Tensor, Tensor] | None:
        return self.cache.cached_context()

    def attend(self, q: Tensor, mask: Mask, score_fn: ScoreFunction | None) -> Tensor | None:
        return self.cache.attend(q, mask, score_fn)

    def observe(self, weights: Tensor) -> Tensor | None:
        """(B, H, N, M) -> (B, H, N, M), also for what the other cache calls; None: unchanged."""
        changed = self.change(weights)
        if self.cache.on_weights is None:
            return changed
        seen = self.cache.on_weights(weights if changed is None else changed)
        return changed if seen is None else seen


def hook_output(module: nn.Module, change: Change) -> RemovableHandle:
    return module.register_forward_hook(lambda module, inputs, output: change(output))


def hook_transposed(module: nn.Module, change: Change) -> RemovableHandle:
    """The change sees (B, N, E) of an output (B, E, N)."""

    def by_token(x: Tensor) -> Tensor | None:
        changed = change(x.mT)  # (B, E, N) -> (B, N, E)
        return None if changed is None else changed.mT  # (B, E, N)

    return hook_output(module, by_token)


def skip(x: Tensor) -> Tensor:
    """Stands for the change of a block's output to its input, which `hook_block` makes."""
    raise TypeError("Only whole blocks can be skipped.")


def hook_block(block: nn.Module, change: Change) -> RemovableHandle:
    """`hook_output`, where the change may be `skip`."""
    if change is skip:
        return block.register_forward_hook(lambda module, inputs, output: inputs[0])
    return hook_output(block, change)


def hook_input(module: nn.Module, change: Change) -> RemovableHandle:
    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        changed = change(inputs[0])
        return None if changed is None else (changed, *inputs[1:])

    return module.register_forward_pre_hook(hook)


def hook_heads(attention: MultiHeadAttention, change: Change) -> RemovableHandle:
    """The change sees (B, N, H, V)."""

    def by_head(x: Tensor) -> Tensor | None:
        changed = change(x.unflatten(-1, (attention.heads, -1)))  # (B, N, H V) -> (B, N, H, V)
        return None if changed is None else changed.flatten(2)  # (B, N, H V)

    return hook_input(attention.output, by_head)


def hook_window_heads(attention: WindowAttention, change: Change) -> RemovableHandle:
    """The change sees (B, N, H, V), of tokens in the order of the grid."""
    windows = attention.windows
    inner = attention.attention

    def by_head(x: Tensor) -> Tensor | None:
        tokens = windows.crop(x)  # (B, P P, H V) -> (B, N, H V)
        changed = change(tokens.unflatten(-1, (inner.heads, -1)))  # (B, N, H, V)
        return None if changed is None else windows.pad(changed.flatten(2))  # (B, P P, H V)

    return hook_input(inner.output, by_head)


def hook_window_weights(attention: WindowAttention, change: Change) -> RemovableHandle:
    """The change sees (B, H, N, N) of all tokens of the grid, 0 between windows."""
    windows = attention.windows

    def on_grid(weights: Tensor) -> Tensor | None:
        changed = change(windows.to_grid(weights))
        return None if changed is None else windows.from_grid(changed, weights)

    return hook_weights(attention, on_grid)


def hook_weights(attention: nn.Module, change: Change) -> RemovableHandle:
    """The change sees (B, H, N, M); the slower formula of `attention` computes them."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        *others, cache = inputs  # a block passes them by position
        return *others, ObservedCache(cache, change)

    # The last hook to wrap the cache is called first: that must be the one added first.
    return attention.register_forward_pre_hook(hook, prepend=True)


def hook_all_tokens(stack: Stack) -> RemovableHandle:
    """Makes the last block compute all tokens, also those that are not used after it.

    A stack with a cache, here one that keeps nothing, skips none.
    """

    def hook(
        module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if options.get("cache", NO_CACHE) is NO_CACHE and len(inputs) < 5:  # not by position
            options = options | {"cache": StackCache()}
        return inputs, options

    return stack.register_forward_pre_hook(hook, with_kwargs=True)


def stacks(net: nn.Module) -> dict[str, Stack]:
    """The stacks of blocks of a network by prefix: "" for one; "encoder." and "decoder."; or of a
    Swin "stages.0." and so on."""
    found = {name: part for name, part in net.named_modules() if isinstance(part, Stack)}
    if len(found) == 1:
        return dict(zip([""], found.values(), strict=True))
    return {name.removesuffix("stack"): stack for name, stack in found.items()}


def hooks_of(net: nn.Module) -> dict[str, Hook]:
    """How to reach each named activation of a network, in the order of a forward pass."""
    found: dict[str, Hook] = {}
    for prefix, stack in stacks(net).items():
        found[f"{prefix}embedding"] = partial(hook_input, stack)
        for index, block in enumerate(stack.blocks):
            name = f"{prefix}blocks.{index}"
            for part, module in block.named_children():
                if isinstance(module, MultiHeadAttention):
                    found[f"{name}.{part}.weights"] = partial(hook_weights, module)
                    found[f"{name}.{part}.heads"] = partial(hook_heads, module)
                if isinstance(module, WindowAttention):
                    found[f"{name}.{part}.weights"] = partial(hook_window_weights, module)
                    found[f"{name}.{part}.heads"] = partial(hook_window_heads, module)
                if part == "token_mixing":
                    found[f"{name}.{part}"] = partial(hook_transposed, module)
                elif part in SUB_LAYERS:
                    last = module
                    if isinstance(block, ResPostBlock):
                        last = block.get_submodule(END_NORMS[part])
                    found[f"{name}.{part}"] = partial(hook_output, last)
            found[name] = partial(hook_block, block)
        found[f"{prefix}hidden"] = partial(hook_output, stack.norm)
    if hasattr(net, "head"):  # a masked autoencoder has none
        two_heads = getattr(net, "distillation_head", None) is not None
        mean_or_head: Any = net if two_heads else net.head
        found["logits"] = partial(hook_output, mean_or_head)
    return found


def activation_names(net: nn.Module) -> list[str]:
    """All names of activations, in the order of a forward pass."""
    return [*hooks_of(net)]


def matching_names(net: nn.Module, *patterns: str) -> list[str]:
    """Names that match patterns such as "blocks.*.attention.weights".

    Raises `ValueError` if a pattern matches none.
    """
    known = activation_names(net)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            close = difflib.get_close_matches(pattern, known, 1, cutoff=0.5)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(
                f'There is no activation "{pattern}": {hint}The names are {known[0]}, ..., '
                f"{known[-1]}."
            )
    return [name for name in known if any(fnmatch.fnmatch(name, one) for one in patterns)]


@contextmanager
def changed(net: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Changes activations, those of all tokens, in each forward pass inside the context.

    Args:
        net: The network; it is as before after the context, also after an error.
        changes: By name or pattern, what to put in the place of an activation.

    Raises:
        ValueError: There is no such activation.
    """
    hooks = hooks_of(net)
    with ExitStack() as handles:
        for stack in stacks(net).values():
            handles.callback(hook_all_tokens(stack).remove)
        for pattern, change in changes.items():
            for name in matching_names(net, pattern):
                handles.callback(hooks[name](change).remove)
        yield


@contextmanager
def recorded(net: nn.Module, *patterns: str) -> Iterator[dict[str, Tensor]]:
    """Records activations of the last forward pass inside the context.

    Args:
        net: The network.
        patterns: Names, or patterns such as "blocks.*"; the weights of attention are computed by a
            slower formula than without looking.

    Yields:
        Activations by name, filled during a forward pass: weights (B, H, N, M), heads (B, N, H, V),
        logits (B, ..., K), and else (B, N, E).

    Raises:
        ValueError: There is no such activation.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        found[name] = value

    names = matching_names(net, *patterns)
    with changed(net, {name: partial(keep, name) for name in names}):
        yield found


def attention_parts(net: nn.Module) -> dict[str, tuple[str, str]]:
    """The kinds of attention of a network: the prefix of their stack, and the sub-layer.

    Returns:
        {"": ("", "attention")}; of an encoder-decoder those of "encoder" and "decoder", which are
        self-attention, and of "cross"; of a Swin those of "stages.0" and so on.
    """
    found = {}
    for prefix, stack in stacks(net).items():
        found[prefix.removesuffix(".")] = (prefix, "attention")
        if stack.config.cross_attention:
            found["cross"] = (prefix, "cross_attention")
    return found


def weight_names(net: nn.Module, part: str = "") -> list[str]:
    """The names of the attention weights of all blocks; `part` as in `attention_parts`."""
    prefix, sub_layer = attention_parts(net)[part]
    blocks = range(len(stacks(net)[prefix].blocks))
    return [f"{prefix}blocks.{block}.{sub_layer}.weights" for block in blocks]


def patch(value: Tensor | float, index: Any = ...) -> Change:
    """A change that puts a value into a part of an activation.

    Args:
        value: The whole activation that `recorded` found for another input, of which `index` takes
            the same part; a batch of one is for all of a batch. Or a number.
        index: The part, as for a tensor: `np.s_[:, 3]` for the token 3; by default all.

    Raises:
        ValueError: In a forward pass, if the part has another shape there.
    """

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[index] = indexed(value, x, index) if isinstance(value, Tensor) else value
        return x

    return change


def indexed(value: Tensor, x: Tensor, index: Any) -> Tensor:
    """The part of `value` that takes the place of that of `x`, as in `patch`."""
    if value.ndim == x.ndim and len(value) == 1:
        value = value.expand(len(x), *value.shape[1:])  # (1, ...) -> (B, ...)
    with suppress(IndexError):
        if value[index].shape == x[index].shape:
            return value[index].to(x)
    raise ValueError(
        f"An activation of shape {(*value.shape,)} cannot patch one of shape {(*x.shape,)}: give "
        "the whole activation for an input of the same length, or an index that both have."
    )


def component(
    net: nn.Module, layer: int, head: int | None = None, part: str = ""
) -> dict[str, Any]:
    """What a head, or a whole layer, adds: names of activations, each with an index into it.

    Args:
        net: The network.
        layer: Number of the block, from 0.
        head: Number of the head, from 0; None: all sub-layers of the block, or of "cross" its
            cross-attention.
        part: "encoder", "decoder" or "cross" of an encoder-decoder, "stages.0" of a Swin, else "".

    Raises:
        ValueError: There is no such block or head.
    """
    known = attention_parts(net)
    if part not in known:
        choice = "leave it out" if "" in known else f"choose from {', '.join(known)}"
        raise ValueError(f'There is no part "{part}": {choice}.')
    prefix, sub_layer = known[part]
    stack = stacks(net)[prefix]
    if not 0 <= layer < len(stack.blocks):
        raise ValueError(f"There is no layer {layer}: they are 0 to {len(stack.blocks) - 1}.")
    name = f"{prefix}blocks.{layer}"
    if head is None:
        children = [child for child, _ in stack.blocks[layer].named_children()]
        whole = [sub_layer] if part == "cross" else SUB_LAYERS
        return {f"{name}.{child}": ... for child in children if child in whole}
    if not 0 <= head < stack.config.heads:
        last = stack.config.heads - 1
        raise ValueError(f"Layer {layer} has no head {head}: they are 0 to {last}.")
    return {f"{name}.{sub_layer}.heads": (..., head, slice(None))}  # of (B, N, H, D)


def ablation(
    net: nn.Module, layer: int, head: int | None = None, part: str = ""
) -> dict[str, Change]:
    """The changes after which a head adds nothing, or a whole layer is skipped, with its norms.

    Arguments and errors as in `component`.
    """
    found = component(net, layer, head, part)
    if head is None and part != "cross":
        prefix, _ = attention_parts(net)[part]
        return {f"{prefix}blocks.{layer}": skip}
    return {name: patch(0.0, index) for name, index in found.items()}


def patching(
    net: nn.Module,
    activations: Mapping[str, Tensor],
    layer: int,
    head: int | None = None,
    part: str = "",
) -> dict[str, Change]:
    """The changes after which a head, or a whole layer, adds what it does for another input.

    Args:
        net: The network.
        activations: What `recorded` found for the other input, of the same length.
        layer: Number of the block, from 0, as in `component`, with its errors.
        head: As of `component`.
        part: As of `component`.
    """
    found = component(net, layer, head, part)
    return {name: patch(activations[name], index) for name, index in found.items()}
