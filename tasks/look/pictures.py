"""What is shown of the models of images: weights over the picture."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.nn.functional as F
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from modules.activations import activation_names, attention_parts, weight_names
from modules.measures import patch_distance, token_losses
from modules.models.swin import Swin
from tasks.look.inspector import (
    AttentionLayers,
    ClassifierInspector,
    Inspector,
    attention_title,
)
from tasks.look.token_views import induction_views, lens, neighbours
from tasks.look.views import Heads, Matrix, View
from tasks.vit.attend import grid_labels

LARGEST_GRID = 1024  # tokens of a stage of a Swin: weights are its square for each head
LENS_PIXELS = 256  # columns of a matrix with texts, 66 points each on the page


class PictureInspector(Inspector):
    """Views of models that read images."""

    input_option = "--image FILE"
    distance_unit = "pixels between patches"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches."""
        grid: tuple[int, int] = self.net.config.grid
        return grid

    def mean_distance(self, weights: Tensor, layers: AttentionLayers) -> Tensor:
        return patch_distance(weights, self.grid, self.net.config.patch_size)

    def inputs(self, batch: Mapping[str, Any]) -> list[Sequence[Any]]:
        return [(image,) for image in batch["image"]]

    def heads(
        self, title: str, weights: Tensor, layers: AttentionLayers, inputs: Sequence[Any]
    ) -> Heads:
        view = super().heads(title, weights, layers, inputs)
        return replace(view, image=self.model.pixels(inputs[0]), grid=self.grid)


class ImageInspector(ClassifierInspector, PictureInspector):
    """Views of image classifiers."""

    model_name = "ImageClassifier"


class Stage(NamedTuple):
    """Tokens of a stage of a Swin. Args: side: of the grid, in tokens; size: of each, in pixels."""

    side: int
    size: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.side, self.side

    def distance(self, weights: Tensor) -> Tensor:
        """Mean distance of attention in pixels: (..., N, N) -> (...)."""
        return patch_distance(weights, self.grid, self.size)

    def picture(self, image: Tensor) -> Tensor:
        """The image (C, S, S), padded if 2 x 2 tokens do not fill the grid before."""
        missing = self.side * self.size - image.shape[-1]
        return F.pad(image, (0, missing, 0, missing))


def stages_of(net: Swin) -> dict[str, Stage]:
    """The stages by part, as of `attention_parts`."""
    config = net.config
    found = [Stage(side, config.patch_size * 2**i) for i, side in enumerate(config.grids)]
    return dict(zip(attention_parts(net), found, strict=True))


def window_layers(net: Swin) -> list[AttentionLayers]:
    """The attention of each stage; warns of those that are too large, which are left out."""
    found = []
    for part, (side, _) in stages_of(net).items():
        if side**2 > LARGEST_GRID:
            rank_zero_warn(
                f"{attention_title(part)} has {side**2:,} tokens: look shows the attention of "
                f"at most {LARGEST_GRID:,}, so that of this stage is left out"
            )
            continue
        names = grid_labels(side, side)
        found.append(AttentionLayers(part, names, names))
    return found


class WindowInspector(ImageInspector):
    """Views of Swins: attention in windows, of each stage in the grid of its own."""

    def attention_layers(self, *inputs: Any) -> list[AttentionLayers]:
        return window_layers(self.net)

    def activations(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """As in the base class, without weights that are not shown."""
        names = {*activation_names(self.net)}
        for part, (side, _) in stages_of(self.net).items():
            if side**2 > LARGEST_GRID:
                names -= {*weight_names(self.net, part)}
        return self.model.activations(*inputs, names=[*names])

    def mean_distance(self, weights: Tensor, layers: AttentionLayers) -> Tensor:
        return stages_of(self.net)[layers.part].distance(weights)

    def heads(
        self, title: str, weights: Tensor, layers: AttentionLayers, inputs: Sequence[Any]
    ) -> Heads:
        stage = stages_of(self.net)[layers.part]
        image = stage.picture(self.model.pixels(inputs[0]))
        view = Inspector.heads(self, title, weights, layers, inputs)
        return replace(view, image=image, grid=stage.grid)


class EncoderInspector(PictureInspector):
    """Views of the encoder of masked autoencoders, which reads all patches."""

    model_name = "MaskedImageModel"
    difference_name = "change of the mean of the patches' vectors, relative to its norm"

    def __init__(self, model: Any) -> None:
        net = copy.deepcopy(model.net)
        del net.decoder
        super().__init__(type(model)(net, model.metadata, model.source))

    def outputs(self, logits: Tensor, reference: Tensor, inputs: Sequence[Any]) -> dict[str, float]:
        return {}

    def difference(self, logits: Tensor, changed_logits: Tensor) -> float:
        return float((changed_logits - logits).norm() / logits.norm())


class PixelInspector(PictureInspector):
    """Views of language models of pixels: the queries are the pixels that are predicted."""

    model_name = "ImageGenerator"
    distance_unit = "pixels, to those before"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the pixels."""
        _, rows, columns = self.model.shape
        return rows, columns

    def mean_distance(self, weights: Tensor, layers: AttentionLayers) -> Tensor:
        return patch_distance(with_last_key(weights), self.grid, 1)

    def heads(
        self, title: str, weights: Tensor, layers: AttentionLayers, inputs: Sequence[Any]
    ) -> Heads:
        layers = layers._replace(keys=[*layers.keys, layers.queries[-1]])
        return super().heads(title, with_last_key(weights), layers, inputs)

    def losses(self, logits: Tensor, inputs: Sequence[Any]) -> Tensor:
        """Of the N pixels, in nats: (N, K) -> (N,)."""
        return token_losses(logits, self.model.tokens(*inputs)[0].cpu())

    def colours(self, tokens: Sequence[int]) -> list[str]:
        """Grey values, or colours as in "#ff8000", of entries of the palette."""
        found = self.model.model.palette.colours.round().int()[[*tokens]].tolist()  # (S, C)
        return [str(*one) if len(one) == 1 else f"#{bytes(one).hex()}" for one in found]

    def outputs(self, logits: Tensor, reference: Tensor, inputs: Sequence[Any]) -> dict[str, float]:
        return {"loss (nats per pixel)": float(self.losses(logits, inputs).mean())}

    def task_tabs(
        self, inputs: Sequence[Any], activations: Mapping[str, Tensor]
    ) -> dict[str, list[View]]:
        losses = self.losses(activations["logits"], inputs).unflatten(0, self.grid)  # (S, S)
        names = [str(number + 1) for number in range(len(losses))]
        note = f"in nats, given the pixels before it; mean {losses.mean():.3f}"
        title = "loss of each pixel"
        matrix = Matrix(title, losses, names, names, "row", "column", note=note, value_name="nats")
        table = self.net.embed.weight[:-1]  # without the token that starts an image
        tokens = self.model.tokens(*inputs)[0].tolist()
        return {
            "logit lens": [self.lens(inputs, activations)],
            "losses": [matrix],
            "neighbours": [neighbours(table, tokens, self.colours)],
        }

    def lens(self, inputs: Sequence[Any], activations: Mapping[str, Tensor]) -> Matrix:
        """The likeliest colour after each block, at each of the first pixels."""
        (layers,) = self.attention_layers(*inputs)
        shown = layers.queries[:LENS_PIXELS]
        count = self.model.model.start
        view = lens(self.net, activations, shown, self.colours, vocabulary=count)
        cut = f"; the first {LENS_PIXELS} of {len(layers.queries):,} pixels"
        return replace(view, note=view.note + cut * (len(shown) < len(layers.queries)))

    def head_statistics(self, layers: AttentionLayers, weights: Tensor) -> list[View]:
        views = super().head_statistics(layers, weights)
        return [*views, *induction_views(self.net, self.model.model.start)]


def with_last_key(weights: Tensor) -> Tensor:
    """Adds the last pixel, which is not read, to the keys: (..., N, N) -> (..., N, N + 1)."""
    return F.pad(weights, (0, 1))
