"""Image classification in Python."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from datamodules.utils.errors import DataError, UsageError
from datamodules.vision.augment import normalise
from datamodules.vision.decoding import decode, pixels_of, resize_and_crop
from modules.models.vit import ViT
from modules.record import AttentionRecord
from tasks.predictions import AnyPrediction
from tasks.tracking.report import counted
from tasks.vit.attend import rollout

from .models import (
    Attention,
    Classifier,
    Result,
    batched,
    check_single,
    one_or_many,
    recorded_weights,
    stacked,
)

Array = np.ndarray | Tensor
OneImage = str | os.PathLike[str] | bytes | Image


class ImageClassifier(Classifier):
    """A Vision Transformer (Dosovitskiy 2021).

    An image is a path, the bytes of a file, an image of Pillow, or uint8 values: an array (H, W) or
    (H, W, C), or a tensor (H, W) or (C, H, W). Its shorter side is resized to the model's image
    size, then the centre is cropped. Methods take one image, or a list, a column of a table or an
    array of images.

    >>> model = tessera.load(run_folder)
    >>> prediction = model.predict(photo)
    >>> prediction.label in model.class_names
    True
    >>> len(model.predict([photo, photo]))
    2
    >>> model.embed([photo, photo]).shape[0]
    2
    >>> weights, tokens, _ = model.attention(photo)
    >>> weights.shape[-1] == len(tokens)
    True
    >>> model.attention_map(photo).ndim
    2
    """

    net: ViT

    @overload
    def predict(  # type: ignore[overload-overlap]
        self, images: OneImage, batch_size: int = 64, top_k: int | None = None
    ) -> AnyPrediction: ...

    @overload
    def predict(  # type: ignore[overload-overlap]
        self, images: Array, batch_size: int = 64, top_k: int | None = None
    ) -> AnyPrediction | list[AnyPrediction]: ...

    @overload
    def predict(
        self, images: Iterable[OneImage | Array], batch_size: int = 64, top_k: int | None = None
    ) -> list[AnyPrediction]: ...

    def predict(
        self, images: Any, batch_size: int = 64, top_k: int | None = None
    ) -> AnyPrediction | list[AnyPrediction]:
        """A `Prediction` for each image, or a `LabelSet` or `Number`, as the model was trained.

        `isinstance` tells a type checker which.

        Args:
            images: One image, or several, as the class describes.
            batch_size: Images at a time.
            top_k: `probabilities` of the k likeliest classes only; None: of all.

        Raises:
            UsageError: An array is not of uint8 values, or has another number of channels.
            DataError: A file is no image.
            TypeError: `images` is neither an image nor several.
        """
        return self._run(images, batch_size, lambda pixels: self.predicted(self.net(pixels), top_k))

    def embed(
        self, images: OneImage | Array | Iterable[OneImage | Array], batch_size: int = 64
    ) -> Tensor:
        """Vectors that the classifier reads, (E,) for one image, (S, E) for several.

        Arguments and errors as of `predict`.
        """
        found = self._run(images, batch_size, lambda pixels: list(self.net.features(pixels).cpu()))
        return stacked(found)

    @torch.no_grad()
    def attention(self, image: OneImage | Array) -> Attention:
        """Weights of all layers and heads for one image, (L, H, N, N).

        The N tokens are class and register tokens, then patches, named "row,column", both from 1.
        """
        record = AttentionRecord()
        self.net.features(self._normalised_one(image), record)
        config = self.net.config
        labels = ["class"] * config.has_class_token
        labels += [f"register {i + 1}" for i in range(config.register_tokens)]
        rows, columns = config.grid
        labels += [f"{row + 1},{column + 1}" for row in range(rows) for column in range(columns)]
        return Attention(recorded_weights(record), labels, labels)

    def attention_map(self, image: OneImage | Array) -> Tensor:
        """Attention of one image to each patch over all layers (rollout, Abnar & Zuidema 2020).

        (rows of patches, columns of patches), which sum to 1.
        """
        found = rollout(self.net, self._normalised_one(image))  # (1, rows, columns)
        return found[0].cpu().clone()  # usable with autograd

    @torch.no_grad()
    def _run(
        self, images: Any, batch_size: int, run: Callable[[Tensor], Sequence[Result]]
    ) -> Result | list[Result]:
        """`run` on batches (B, C, S, S); it returns a list of B results."""

        def all_batches(samples: list[Any]) -> list[Result]:
            parts = (run(self._normalised(part)) for part in batched(samples, batch_size))
            return [result for part in parts for result in part]

        return one_or_many(images, is_image(images), all_batches)

    def _normalised(self, images: Sequence[Any]) -> Tensor:
        """Pixels of B images as the network reads them, (B, C, S, S)."""
        pixels = torch.stack([self._pixels(image) for image in images]).to(self.device)
        return normalise(pixels, self.metadata["mean"], self.metadata["std"])

    def _normalised_one(self, image: Any) -> Tensor:
        """Pixels of one image as the network reads them, (1, C, S, S)."""
        check_single(is_image(image), image, "image")
        return self._normalised([image])

    def _pixels(self, image: Any) -> Tensor:
        """Pixels of one image, uint8 (C, S, S)."""
        channels = self.metadata["channels"]
        if isinstance(image, str | os.PathLike):
            pixels = decoded(Path(image).read_bytes(), channels, str(image))
        elif isinstance(image, bytes):
            pixels = decoded(image, channels, f"a sample of {len(image)} bytes")
        elif isinstance(image, Image):
            pixels = pixels_of(image, channels)
        else:
            pixels = pixels_of_array(image, channels)
        return resize_and_crop(pixels, self.metadata["image_size"])


def decoded(content: bytes, channels: int, name: str) -> Tensor:
    """Pixels of an encoded image, uint8 (C, H, W); `DataError` with its name if it is none."""
    try:
        return decode(content, channels)
    except (OSError, RuntimeError, ValueError, SyntaxError) as error:
        raise DataError(f"{name} is no image that can be read ({error})") from error


def is_image(images: Any) -> bool:
    """Whether this is one image, not a list of them."""
    is_file = isinstance(images, str | os.PathLike | bytes | Image)
    return is_file or (isinstance(images, np.ndarray | Tensor) and 2 <= images.ndim <= 3)


def pixels_of_array(image: Any, channels: int) -> Tensor:
    """An array (H, W) or (H, W, C), or a tensor (C, H, W), as uint8 (C, H, W)."""
    if isinstance(image, np.ndarray):
        array = image[..., None] if image.ndim == 2 else image  # (H, W, C)
        image = torch.from_numpy(np.ascontiguousarray(array)).permute(2, 0, 1)  # (C, H, W)
    elif isinstance(image, Tensor) and image.ndim == 2:
        image = image[None]  # (H, W) -> (1, H, W)
    if not isinstance(image, Tensor) or image.ndim != 3 or image.dtype != torch.uint8:
        found = type(image).__name__
        if isinstance(image, np.ndarray | Tensor):
            found = f"{image.dtype} of shape {tuple(image.shape)}"
        raise UsageError(
            "an image is a path, an image of Pillow, or uint8 values, an array (H, W, C) or a "
            f"tensor (C, H, W), not {found}"
        )
    if len(image) == 1 and channels == 3:
        return image.expand(3, -1, -1)
    if len(image) != channels:
        raise UsageError(
            f"the model reads images of {counted(channels, 'channel')}, not {len(image)}: an array "
            "is (H, W, C), a tensor (C, H, W), and of several (B, H, W, C) or (B, C, H, W)"
        )
    return image
