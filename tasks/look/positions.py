"""Position encodings as heat map, lines and similarity."""

import torch
from torch import Tensor, nn

from modules.measures import cosine_similarity
from modules.position import Position, grid_positions
from modules.transformer import Stack
from tasks.look.views import Curves, Matrix, View

LONGEST = 256  # positions that are drawn
CHANNELS = 6  # that are drawn as lines


@torch.no_grad()
def position_views(net: nn.Module) -> list[View]:
    """What the position encodings of a network add, for its first positions."""
    views: list[View] = []
    for name, part in net.named_modules():
        if isinstance(part, Position):
            title = name.replace(".", " ")
            tables = [p.shape[-1] for p in part.parameters() if p.ndim > 1]
            width = next(m for m in net.modules() if isinstance(m, Stack)).config.width
            views += views_of(part, title, max(tables, default=width))
    return views


def views_of(position: Position, title: str, width: int) -> list[View]:
    """Views of one encoding, of vectors of `width` E."""
    device = next(iter([*position.parameters(), torch.empty(0)])).device
    positions = grid_positions(position.grid, device)[:, :LONGEST]  # (1, N, A)
    names = [",".join(map(str, point)) for point in positions[0].tolist()]
    size = len(names)
    zeros = torch.zeros(1, size, width, device=device)
    vectors = position.embed(zeros, positions)[0].cpu()  # (N, E)
    if vectors.any():
        return vector_views(vectors, names, f"{title}: added vectors")
    rotation = position.rotate(positions)
    if rotation is not None:
        ones = torch.ones(1, 1, size, rotation.cos.shape[-1], device=device)
        return vector_views(rotation(ones)[0, 0].cpu(), names, f"{title}: ones, rotated")
    bias = position.bias(positions, positions)
    if bias is not None:
        first = bias[0, :, size // 2].float().cpu()  # (H, N), of the query in the middle
        heads = {f"head {head}": row for head, row in enumerate(first.tolist())}
        caption = f"{title}: added to the scores of query {names[size // 2]}"
        return [Curves(caption, [*range(size)], {**heads}, "key position", "bias")]
    return []


def vector_views(vectors: Tensor, names: list[str], title: str) -> list[View]:
    """Heat map, lines and similarity of vectors (N, E)."""
    width = vectors.shape[1]
    chosen = range(0, width, max(1, width // CHANNELS))
    lines = {f"channel {index}": vectors[:, index].tolist() for index in chosen}
    channels = [*map(str, range(width))]
    similar = cosine_similarity(vectors)
    return [
        Matrix(title, vectors, names, channels, "position", "channel", diverging=True),
        Matrix(f"{title}: cosine", similar, names, names, "position", "position", diverging=True),
        Curves(f"{title}: channels", [*range(len(names))], {**lines}, "position", "value"),
    ]
