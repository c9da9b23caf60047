"""Images whose pixels are tokens of a palette, for image GPT."""

import math
from typing import Any

from datamodules.images import UnlabelledImageData
from datamodules.utils.errors import UsageError, require_same
from datamodules.vision.palette import fit_palette, read_palette

DEFAULT_PALETTE = 512  # colours (Chen 2020)


class PixelData(UnlabelledImageData):
    """Batches of `UnlabelledImageData`, and a palette that turns their pixels into tokens.

    Images with few colours, such as the 17 grey levels of the digits, keep all of them; others get
    a palette by k-means on training pixels, for which scikit-learn is needed. Images are tokens
    after their augmentation, on the device: `Palette.encode` of `datamodules.vision.palette`.

    Args:
        palette_size: Largest number of colours; null: 512 (Chen 2020).
        palette: File with the palette to use; palette.json of a run folder,
            preprocessor_config.json of an ImageGPT of transformers, or their folder; null: the
            palette of the training images.
        kwargs: Those of `ImageData`.
    """

    def __init__(
        self, palette_size: int | None = None, palette: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if palette_size is not None and palette_size < 2:
            raise UsageError(f"--data.palette_size is {palette_size}, but must be at least 2.")
        self.palette_size = palette_size
        self.palette_file = palette

    def measure_metadata(self) -> dict[str, Any]:
        """Primitives that a checkpoint keeps.

        Returns:
            those of `ImageData`, palette (K colours of C values in [0, 255]), palette_size and
            palette_file (as they were asked for).
        """
        channels = self._layout["channels"]
        if self.palette_file is not None:
            palette = read_palette(self.palette_file, channels)
            if self.palette_size not in (None, len(palette)):
                raise UsageError(
                    f"--data.palette_size is {self.palette_size}, but {self.palette_file} has "
                    f"{len(palette)} colours: leave it out."
                )
        else:
            palette = fit_palette(
                self.dataset("train"), self.palette_size or DEFAULT_PALETTE, self.seed
            )
        return {
            **super().measure_metadata(),
            "palette": palette.to_list(),
            "palette_size": self.palette_size,
            "palette_file": self.palette_file,
        }

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """As in the base class. Raises `UsageError` also if the options name another palette."""
        stored = metadata["palette"]
        require_same("palette_size", self.palette_size, metadata["palette_size"] or len(stored))
        if self.palette_file not in (None, metadata["palette_file"]):  # which may be gone
            given = read_palette(self.palette_file, metadata["channels"])
            if not is_same_palette(given.to_list(), stored):
                raise UsageError(
                    f"the palette {self.palette_file} ({len(given)} colours) is not the "
                    f"checkpoint's ({len(stored)} colours): leave --data.palette out."
                )
        super().set_metadata(metadata)


def is_same_palette(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    """Whether two palettes have the same colours, up to the rounding of a file."""
    same_size = len(ours) == len(theirs) and len(ours[0]) == len(theirs[0])
    return same_size and all(
        math.isclose(a, b, abs_tol=2e-3)
        for colour, other in zip(ours, theirs, strict=True)
        for a, b in zip(colour, other, strict=True)
    )
