"""Image classification and masked autoencoders in Python."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.random_numbers import rand_of_seeds
from datamodules.vision.augment import normalise
from datamodules.vision.decoding import ResizeAndCrop, TooManyPixels, decode, pixels_of
from datamodules.vision.records import reason_of
from datamodules.vision.views import VIEWS, ViewsName, average_over_views
from modules.activations import attention_parts, weight_names
from modules.models.images import ImageNet
from modules.models.mae import MaskedAutoencoder
from modules.models.swin import Swin
from modules.models.vit import ViTEncoder
from modules.record import AttentionRecord
from tasks.mae.pictures import three_pictures
from tasks.predictions import AnyPrediction
from tasks.tracking.report import format_count
from tasks.vit.attend import grid_labels, patch_labels, rollout

from .models import (
    Attention,
    Classifier,
    Model,
    Result,
    check_single,
    no_attention,
    one_or_many,
    recorded_weights,
    split_into_batches,
    stack_rows,
)

Array = np.ndarray | Tensor
OneImage = str | os.PathLike[str] | bytes | Image


class Reconstruction(NamedTuple):
    """One image three times, uint8 (C, S, S) each.

    Args:
        original: As the network sees it.
        masked: With the mean colour in masked patches.
        reconstructed: With predictions in masked patches.
    """

    original: Tensor
    masked: Tensor
    reconstructed: Tensor


def read_pixels(image: Any, metadata: Mapping[str, Any]) -> Tensor:
    """Pixels of what `ImageModel` takes as an image, uint8 (C, S, S)."""
    channels = metadata["channels"]
    if isinstance(image, str | os.PathLike):
        pixels = decode_image(content_of(image), channels, str(image))
    elif isinstance(image, bytes):
        pixels = decode_image(image, channels, f"a sample of {len(image)} bytes")
    elif isinstance(image, Image):
        try:
            pixels = pixels_of(image, channels)
        except ValueError as error:  # of modes that cannot be converted
            raise UsageError(f"an image of Pillow: {error}") from error
        except (OSError, SyntaxError) as error:  # its file is read only now
            raise DataError(f"an image of Pillow cannot be read ({reason_of(error)})") from error
    else:
        pixels = pixels_of_array(image, channels)
    return ResizeAndCrop.of(metadata)(pixels)


class ImageModel(Model):
    """A model of images.

    An image is a path, the bytes of a file, an image of Pillow, or uint8 values: an array (H, W) or
    (H, W, C), or a tensor (H, W) or (C, H, W). Its shorter side is resized, then the centre is
    cropped, as image_size, interpolation and crop_pct in `metadata` say. Methods take one image, or
    a list, a column of a table or an array of images, (S, H, W, C); an array with three axes is one
    image, so give grey images as (S, H, W, 1), or as a list.
    """

    net: ViTEncoder | Swin

    def vectors(self, pixels: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, E), what `embed` returns."""
        raise NotImplementedError

    def embed(
        self, images: OneImage | Array | Iterable[OneImage | Array], batch_size: int = 64
    ) -> Tensor:
        """A vector of each image: (E,) for one, (S, E) for several.

        Args:
            images: One image, or several, as the class describes.
            batch_size: Images at a time.

        Raises:
            UsageError: An array is not of uint8 values, or has another number of channels.
            DataError: A file is not an image.
            TypeError: `images` is neither an image nor several.
        """
        found = self._run(images, batch_size, lambda pixels: list(self.vectors(pixels).cpu()))
        return stack_rows(found)

    @torch.no_grad()
    def attention(self, image: OneImage | Array, stage: int = -1) -> Attention:
        """Weights of all layers and heads for one image, (L, H, N, N).

        The N tokens are class and register tokens, then patches, named "row,column", both from 1.
        Those of a Swin are the tokens of a stage, with weights 0 between windows; rows sum to less
        than 1 where windows reach beyond its grid.

        Args:
            image: As the class describes.
            stage: Stage of a Swin, from 0; -1: the last. Each has its own L, H and N; the N^2
                weights of a head are 40 MB in the first stage of a `swin_tiny`.

        Raises:
            UsageError: The network has no attention, or no such stage.
        """
        parts = [*attention_parts(self.net)] if isinstance(self.net, Swin) else [""]
        if not -len(parts) <= stage < len(parts):
            found = format_count(len(parts), "stage")
            raise UsageError(f"stage is {stage}, but this network has {found}, counted from 0")
        if isinstance(self.net, Swin):
            names = weight_names(self.net, parts[stage])
            side = self.net.config.grids[stage]
            labels = grid_labels(side, side)
            weights = [*self.activations(image, names=names).values()]
            return Attention(torch.stack(weights), labels, labels)
        record = AttentionRecord()
        self.net.tokens(self._normalised_one(image), record)
        labels = patch_labels(self.net.config)
        return Attention(recorded_weights(record), labels, labels)

    @torch.no_grad()
    def _run(
        self, images: Any, batch_size: int, run: Callable[[Tensor], Sequence[Result]]
    ) -> Result | list[Result]:
        """`run` on batches (B, C, S, S); it returns a list of B results."""

        is_one = is_image(images)

        def all_batches(samples: list[Any]) -> list[Result]:
            results: list[Result] = []
            for part in split_into_batches(samples, batch_size):
                first = None if is_one else len(results)
                results += run(self._normalised(part, first))
            return results

        return one_or_many(images, is_one, all_batches)

    def _normalised(self, images: Sequence[Any], first: int | None = None) -> Tensor:
        """Pixels of B images as the network reads them, (B, C, S, S).

        `first` is the number of the first of them in a list, for messages.
        """
        found = []
        for i, image in enumerate(images):
            with with_index(None if first is None else first + i):
                found.append(self.pixels(image))
        pixels = torch.stack(found).to(self.device)
        return normalise(pixels, self.metadata["mean"], self.metadata["std"])

    def _normalised_one(self, image: Any) -> Tensor:
        """Pixels of one image as the network reads them, (1, C, S, S)."""
        check_single(is_image(image), image, "image")
        return self._normalised([image])

    def pixels(self, image: Any) -> Tensor:
        """Pixels of one image as the network sees them, but not normalised, uint8 (C, S, S)."""
        return read_pixels(image, self.metadata)


class ImageClassifier(ImageModel, Classifier):
    """A Vision Transformer (Dosovitskiy 2021), or a Swin Transformer (Liu 2021).

    Its methods take images as `ImageModel` describes.

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

    net: ImageNet

    @overload
    def predict(  # type: ignore[overload-overlap]
        self,
        images: OneImage,
        batch_size: int = 64,
        top_k: int | None = None,
        tta: ViewsName = "none",
    ) -> AnyPrediction: ...

    @overload
    def predict(  # type: ignore[overload-overlap]
        self,
        images: Array,
        batch_size: int = 64,
        top_k: int | None = None,
        tta: ViewsName = "none",
    ) -> AnyPrediction | list[AnyPrediction]: ...

    @overload
    def predict(
        self,
        images: Iterable[OneImage | Array],
        batch_size: int = 64,
        top_k: int | None = None,
        tta: ViewsName = "none",
    ) -> list[AnyPrediction]: ...

    def predict(
        self,
        images: Any,
        batch_size: int = 64,
        top_k: int | None = None,
        tta: ViewsName = "none",
    ) -> AnyPrediction | list[AnyPrediction]:
        """A `Prediction` for each image, or a `LabelSet` or `Number`, as the model was trained.

        `isinstance` tells a type checker which.

        Args:
            images: One image, or several, as the class describes.
            batch_size: Images at a time.
            top_k: `probabilities` of the k most likely classes only; None: of all.
            tta: Views of each image over which the logits are averaged, as `--model.tta`.

        Raises:
            UsageError: An array is not of uint8 values, or has another number of channels; or there
                are no such views.
            DataError: A file is not an image.
            TypeError: `images` is neither an image nor several.
        """
        if tta not in VIEWS:
            raise UsageError(f"tta is {tta!r}, but must be one of {', '.join(VIEWS)}.")

        def predictions(pixels: Tensor) -> list[AnyPrediction]:
            return self.to_predictions(average_over_views(self.net, pixels, tta), top_k)

        return self._run(images, batch_size, predictions)

    def vectors(self, pixels: Tensor) -> Tensor:
        """As in the base class: what the classifier reads."""
        return self.net.features(pixels)

    @torch.no_grad()
    def logits(self, image: OneImage | Array) -> Tensor:
        """Outputs of the network for one image, (K,)."""
        return self.net(self._normalised_one(image))[0].float().cpu()

    def attention_map(self, image: OneImage | Array) -> Tensor:
        """Attention of one image to each patch over all layers (rollout, Abnar & Zuidema 2020).

        (rows of patches, columns of patches), which sum to 1. Raises `UsageError` if the network
        has no attention between all tokens, as a Swin.
        """
        found = rollout(self.net, self._normalised_one(image))  # (1, rows, columns)
        if found is None:
            raise no_attention()
        return found[0].cpu().clone()  # usable with autograd


class MaskedImageModel(ImageModel):
    """A masked autoencoder (He 2022).

    Its methods take images as `ImageModel` describes.

    >>> model = tessera.load(run_folder)
    >>> model.reconstruct(photo).reconstructed.shape[0] == model.metadata["channels"]
    True
    >>> model.embed([photo, photo]).shape[0]
    2
    """

    net: MaskedAutoencoder

    def vectors(self, pixels: Tensor) -> Tensor:
        """As in the base class: the mean of the encoder's patches, all of them visible."""
        return self.net.tokens(pixels)[:, self.net.config.prefix_tokens :].mean(1)  # (B, E)

    @torch.no_grad()
    def logits(self, image: OneImage | Array) -> Tensor:
        """What `embed` returns for one image, the output of the encoder: (E,)."""
        return self.vectors(self._normalised_one(image))[0].float().cpu()

    @torch.no_grad()
    def reconstruct(self, image: OneImage | Array, seed: int = 0) -> Reconstruction:
        """Masks patches of one image, and predicts them.

        Args:
            image: As the class describes.
            seed: Which patches are masked.

        Raises as `embed`, and `UsageError` for a seed that is no whole number of 64 bits.
        """
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise UsageError(f"seed is {seed!r}, but must be a whole number of 64 bits.")
        pixels = self._normalised_one(image)  # (1, C, S, S)
        noise = rand_of_seeds([seed], self.net.config.num_patches).to(self.device)  # (1, N)
        kept, masked = self.net.split(noise)  # (1, K), (1, M)
        predicted = self.net(pixels, kept, masked)  # (1, M, C P P)
        shown = three_pictures(self.net, self.metadata, pixels, predicted, masked)
        return Reconstruction(**{name: images[0].cpu() for name, images in shown.items()})


def content_of(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file; `DataError` if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read ({reason}): give another path") from error


def decode_image(content: bytes, channels: int, name: str) -> Tensor:
    """Pixels of an encoded image, uint8 (C, H, W); `DataError` with its name if it is none."""
    try:
        return decode(content, channels)
    except TooManyPixels as error:
        raise DataError(f"{name} {error}") from error
    except (OSError, RuntimeError, ValueError, SyntaxError) as error:
        raise DataError(f"{name} is not an image that can be read ({reason_of(error)})") from error


@contextmanager
def with_index(number: int | None) -> Iterator[None]:
    """Begins messages about an image with its number in a list; None: it is in none."""
    try:
        yield
    except (DataError, UsageError) as error:
        if number is None:
            raise
        raise type(error)(f"images[{number}]: {error}") from error


def is_image(images: Any) -> bool:
    """Whether this is one image, not a list of them; raises `UsageError` for an open file."""
    is_file = isinstance(images, str | os.PathLike | bytes | Image)
    if not is_file and hasattr(images, "read"):
        text = "this is an open file: give its path, or the bytes that its read() returns"
        raise UsageError(text)
    return is_file or (isinstance(images, np.ndarray | Tensor) and 2 <= images.ndim <= 3)


def pixels_of_array(image: Any, channels: int) -> Tensor:
    """An array (H, W) or (H, W, C), or a tensor (C, H, W), as uint8 (C, H, W)."""
    found = type(image).__name__
    if isinstance(image, np.ndarray | Tensor):
        found += f" of {image.dtype} and shape {tuple(image.shape)}"
    is_array = isinstance(image, np.ndarray | Tensor) and image.ndim in (2, 3)
    is_array = is_array and 0 not in image.shape
    if isinstance(image, np.ndarray) and is_array:
        array = image[..., None] if image.ndim == 2 else image  # (H, W, C)
        image = torch.from_numpy(np.array(array)).permute(2, 0, 1)  # (C, H, W)
    elif isinstance(image, Tensor) and image.ndim == 2:
        image = image[None]  # (H, W) -> (1, H, W)
    if not is_array or image.dtype != torch.uint8:
        raise UsageError(
            "an image is a path, the bytes of a file, an image of Pillow, or uint8 values, an "
            f"array (H, W, C) or a tensor (C, H, W), not {found}"
        )
    if len(image) == 1 and channels == 3:
        return image.expand(3, -1, -1)
    if len(image) != channels:
        raise UsageError(
            f"the model reads images of {format_count(channels, 'channel')}, not {len(image)}: an "
            "array is (H, W, C), a tensor (C, H, W), and of several (B, H, W, C) or (B, C, H, W)"
        )
    return image
