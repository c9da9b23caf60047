"""Position encodings as heat map, lines and similarity."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.measures import cosine_similarity
from modules.position import Position, grid_positions
from modules.windows import RelativeBias
from tasks.look.views import Curves, Matrix, View
from tasks.vit.attend import grid_labels

LONGEST = 256  # positions that are drawn
LONGEST_BIAS = 64  # of the queries and keys of each head
CHANNELS = 6  # that are drawn as lines


@torch.no_grad()
def position_views(net: nn.Module) -> list[View]:
    """What the position encodings of a network add, for its first positions."""
    views: list[View] = []
    for name, part in net.named_modules():
        if isinstance(part, Position):
            title = name.replace(".", " ")
            tables = [p.shape[-1] for p in part.parameters() if p.ndim > 1]
            stack: Any = net.get_submodule(f"{name.removesuffix('position')}stack").config
            width = getattr(net.config, "embedding_width", None) or stack.width
            views += views_of(part, title, max(tables, default=width), stack.causal)
        if isinstance(part, RelativeBias):
            _, stage, _, _, layer, *_ = name.split(".")  # stages.0.stack.blocks.1.attention.bias
            views.append(offset_map(part, f"stage {stage}, layer {layer}: bias of each head"))
    return views


def views_of(position: Position, title: str, width: int, causal: bool = False) -> list[View]:
    """Views of one encoding, of vectors of `width` E; `causal`: without keys after the query."""
    device = next(iter([*position.parameters(), torch.empty(0)])).device
    positions = grid_positions(position.grid, device)[:, :LONGEST]  # (1, N, A)
    size = positions.shape[1]
    names = [str(index) for index in range(size)]
    if len(position.grid) == 2:
        names = grid_labels(*position.grid)[:size]  # as in attention
    cut = cut_note(position, size)
    zeros = torch.zeros(1, size, width, device=device)
    vectors = position.embed(zeros, positions)[0].cpu()  # (N, E)
    if vectors.any():
        note = "what the encoding adds to the vector of a token at each position" + cut
        return vector_views(vectors, names, f"{title}: added vectors", note)
    rotation = position.rotate(positions)
    if rotation is not None:
        ones = torch.ones(1, 1, size, rotation.cos.shape[-1], device=device)
        note = "queries and keys are rotated, by an angle that grows with the position; here a "
        note += "vector of ones after this rotation" + cut
        return vector_views(
            rotation(ones)[0, 0].cpu(), names, f"{title}: a rotated vector of ones", note
        )
    bias = position.bias(positions, positions)
    if bias is not None:
        middle = bias[0, :, size // 2].float().cpu()  # (H, N), of the query in the middle
        keys = size // 2 + 1 if causal else size
        heads = {f"head {head}": row for head, row in enumerate(middle[:, :keys].tolist())}
        caption = f"{title}: added to the scores of query {names[size // 2]}"
        note = "over the positions of the keys" + ", up to the query" * causal + cut
        views = [curves(caption, names[:keys], {**heads}, "bias", note)]
        return [*views, *bias_matrices(position, title, bias[0], names[:LONGEST_BIAS])]
    return []


def bias_matrices(
    position: Position, title: str, bias: Tensor, names: list[str]
) -> Iterator[Matrix]:
    """A heat map for each head of a bias (H, N, N), of the positions that have names."""
    count = len(names)
    note = "added to the scores of queries and keys" + cut_note(position, count)
    for head, values in enumerate(bias[:, :count, :count].float().cpu()):
        caption = f"{title}: bias of head {head}"
        yield Matrix(caption, values, names, names, "query", "key", (), True, note, "bias")


def offset_map(bias: RelativeBias, title: str) -> Matrix:
    """One heat map of T tiles: the bias of each head over the offsets in a window.

    The last tiles are empty if the H heads do not fill the rows.
    """
    maps = bias.offsets().float().cpu().flip(0, 1).permute(2, 0, 1)  # (H, D, D), of key - query
    heads, side, _ = maps.shape
    across = math.ceil(math.sqrt(heads))
    down = math.ceil(heads / across)
    padding = (0, 1, 0, 1, 0, across * down - heads)  # between heads, and no heads at the end
    tiles = F.pad(maps, padding, value=math.nan)  # (T, D + 1, D + 1)
    tiles = tiles.unflatten(0, (down, across)).transpose(1, 2)  # (down, D + 1, across, D + 1)
    values = tiles.flatten(2).flatten(0, 1)[:-1, :-1]  # (down (D + 1) - 1, across (D + 1) - 1)
    names = [*(str(offset - side // 2) for offset in range(side)), ""]
    rows, columns = ((names * count)[:-1] for count in (down, across))
    note = "added to the scores of a query and a key that is so many tokens below and right of it; "
    note += f"heads row by row, {across} in a row"
    below, right = "tokens below the query", "tokens right of it"
    low, high = float(maps.min()), float(maps.max())
    return Matrix(
        title, values, rows, columns, below, right,
        diverging=low < 0, note=note, value_name="bias", limits=(low, high),
    )  # fmt: skip


def cut_note(position: Position, count: int) -> str:
    """Says that an encoding has more positions than are drawn."""
    total = math.prod(position.grid)
    return f"; the first {count} of {total:,} positions" if count < total else ""


def curves(
    title: str, names: list[str], lines: dict[str, Sequence[float]], y_name: str, note: str = ""
) -> Curves:
    """Lines over positions; those of a grid are numbered from 1, row by row."""
    if "," in names[0]:
        x = [*range(1, len(names) + 1)]
        return Curves(title, x, lines, "position, row by row from 1", y_name, note)
    return Curves(title, [*range(len(names))], lines, "position", y_name, note)


def vector_views(vectors: Tensor, names: list[str], title: str, note: str) -> list[View]:
    """Heat map, lines and similarity of vectors (N, E)."""
    width = vectors.shape[1]
    chosen = range(0, width, max(1, width // CHANNELS))
    lines = {f"channel {index}": vectors[:, index].tolist() for index in chosen}
    channels = [*map(str, range(width))]
    similar = cosine_similarity(vectors)
    return [
        Matrix(title, vectors, names, channels, "position", "channel", (), True, note),
        Matrix(
            f"{title}: cosine similarity",
            similar,
            names,
            names,
            "position",
            "position",
            (),
            True,
            note,
        ),
        curves(f"{title}: channels", names, {**lines}, "value", note),
    ]
