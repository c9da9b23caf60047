"""Image GPT in Python."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_type_hints

import torch
from torch import Tensor
from typing_extensions import Unpack

from modules.models.gpt import Decoder
from modules.record import AttentionRecord
from modules.schema import check_value
from tasks.errors import UsageError, unknown_name, usage_errors
from tasks.igpt.architectures import PixelModel
from tasks.igpt.probe import layer_features
from tasks.igpt.sampling import PixelSampling, check_count, complete_images, sample_images
from tasks.vit.attend import grid_labels

from .images import Array, OneImage, is_image, read_pixels, with_index
from .models import (
    Attention,
    Model,
    check_single,
    one_or_many,
    recorded_weights,
    split_into_batches,
    stack_rows,
)
from .options import SamplingOptions


class ImageGenerator(Model):
    """A language model of pixels (Chen 2020).

    An image is what `ImageClassifier` takes.

    >>> model = tessera.load(run_folder)
    >>> model.sample(2, top_p=0.9).shape == (2, *model.shape)
    True
    >>> model.complete(photo, 3).shape == (3, *model.shape)
    True
    >>> model.embed([photo, photo]).shape == (2, len(model.embed(photo)))
    True
    >>> weights, predicted, read = model.attention(photo)
    >>> predicted[:2], read[:2]
    (['1,1', '1,2'], ['start', '1,1'])
    """

    net: Decoder

    def __init__(self, model: PixelModel, source: str) -> None:
        super().__init__(model.net, dict(model.metadata), source)

    @property
    def model(self) -> PixelModel:
        """The network with its palette."""
        return PixelModel(self.net, self.metadata)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of its images."""
        return self.metadata["channels"], self.model.size, self.model.size

    def sample(self, count: int = 1, **options: Unpack[SamplingOptions]) -> Tensor:
        """New images, uint8 (count, C, S, S).

        Args:
            count: How many.
            options: Those of `tasks.igpt.sampling.PixelSampling`: temperature (1; 0: always the
                most likely colour), top_k, top_p, min_p (None: sample from all colours), seed (0;
                the next image has one more).

        Raises:
            UsageError: There is no such option, or its value does not fit.
        """
        return sample_images(self.model, count, sampling(count, options))

    def complete(
        self, image: OneImage | Array, count: int = 1, **options: Unpack[SamplingOptions]
    ) -> Tensor:
        """Images with the upper half of one and a new lower half, uint8 (count, C, S, S).

        Args:
            image: As the class describes.
            count: How many.
            options: As in `sample`.

        Raises:
            UsageError: As in `sample`, or an array is not an image.
            DataError: A file is not an image.
        """
        found = sampling(count, options)
        return complete_images(self.model, self._pixels(image), count, found)[0]

    @torch.no_grad()
    def logits(self, image: OneImage | Array) -> Tensor:
        """Scores of the K colours for each of the N pixels, given those before it: (N, K)."""
        model = self.model
        hidden = self.net(model.inputs(self.tokens(image)))
        return self.net.logits(hidden)[0, :, : len(model.palette)].float().cpu()

    def embed(
        self, images: OneImage | Array | Iterable[OneImage | Array], batch_size: int = 8
    ) -> Tensor:
        """A vector of each image: (E,) for one, (S, E) for several.

        The mean over all pixels of the features of the last layer, as `tasks.igpt probe` classifies
        them. Layers in the middle often tell classes better; `activations` returns them. Raises
        what `complete` raises.

        Args:
            images: One, or several.
            batch_size: Images at a time.
        """
        is_one = is_image(images)

        def run(given: list[Any]) -> list[Tensor]:
            rows = []
            for number, one in enumerate(given):
                with with_index(None if is_one else number):
                    rows.append(self.tokens(one))
            vectors: list[Tensor] = []
            for part in split_into_batches(rows, batch_size):
                tokens = torch.cat([*part])  # (B, N)
                vectors += layer_features(self.net, self.model.inputs(tokens))[-1].cpu()  # (B, E)
            return vectors

        return stack_rows(one_or_many(images, is_one, run))

    @torch.no_grad()
    def attention(self, image: OneImage | Array) -> Attention:
        """Weights of all layers and heads for one image, (L, H, N, N).

        Queries are the N pixels that are predicted, named "row,column", both from 1. Keys are what
        the network reads: "start", then all pixels but the last.
        """
        model = self.model
        record = AttentionRecord()
        self.net(model.inputs(self.tokens(image)), cache=record)
        labels = grid_labels(model.size, model.size)
        return Attention(recorded_weights(record), labels, ["start", *labels[:-1]])

    def tokens(self, image: OneImage | Array) -> Tensor:
        """The number in the palette of each pixel of one image, row by row: (1, N)."""
        return self.model.palette.encode(self._pixels(image).to(self.device))

    def pixels(self, image: OneImage | Array) -> Tensor:
        """One image as the network sees it, in the colours of the palette: uint8 (C, S, S)."""
        return self.model.palette.decode(self.tokens(image).cpu())[0]

    def _pixels(self, image: Any) -> Tensor:
        """Pixels of one image of the network's size, uint8 (1, C, S, S)."""
        check_single(is_image(image), image, "image")
        return read_pixels(image, self.metadata)[None]


def sampling(count: int, options: SamplingOptions) -> PixelSampling:
    """Returns options of sampling; raises `UsageError` if one is unknown or does not fit."""
    known = [field.name for field in fields(PixelSampling)]
    for name in options:
        if name not in known:
            raise UsageError(unknown_name(name, known, "option"))
    types = get_type_hints(PixelSampling)
    with usage_errors():
        values = {name: check_value(types[name], value, name) for name, value in options.items()}
        found = PixelSampling(**values)
        check_value(int, count, "count")
        check_count("count", count, found.temperature)
    return found
