"""`python -m tasks.igpt generate`: new images, and images whose lower halves are new."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from datamodules.vision.decoding import ResizeAndCrop
from datamodules.vision.records import IMAGE_ENDINGS, Records
from modules.config import require
from tasks.checkpoints.exporting import new_file
from tasks.cli.text_io import print_note
from tasks.errors import UsageError
from tasks.igpt.architectures import PixelModel, load_model
from tasks.igpt.pictures import completion_grid, sample_grid
from tasks.igpt.sampling import PixelSampling, check_count, complete_images, sample_images
from tasks.inference import InferenceOptions, prepare_model
from tasks.tracking.report import format_count


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PixelSampling, InferenceOptions):
    """Sample images, or complete given ones.

    Args:
        input: Image whose lower half is replaced, or a folder of images; null: new images.
        output: PNG file to write.
        samples: Images to sample, or completions of each input; null: 16, or 4 of each
            input; 1 at temperature 0.
    """

    input: str | None = None
    output: str = "generated.png"
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("samples", self.count, self.temperature)
        require(self.output.lower().endswith(".png"), f"output {self.output} must end with .png.")

    @property
    def count(self) -> int:
        """Images to sample, or completions of each input."""
        if self.samples is not None:
            return self.samples
        if self.temperature == 0:  # all would be the same
            return 1
        return 4 if self.input else 16


def generate(options: GenerateOptions) -> None:
    """Sample images, or complete the lower halves of given ones, pixel by pixel."""
    from PIL import Image

    model = prepare_model(load_model(options.ckpt_path), options.device, options.quantize)
    given = read_images(model, options.input)
    start = time.perf_counter()
    if given is None:
        images = sample_images(model, options.count, options)
        picture = sample_grid(images)
    else:
        completed = complete_images(model, given, options.count, options)  # (B, count, C, S, S)
        originals = model.palette.decode(model.palette.encode(given))
        picture = completion_grid(originals, completed)
        images = completed.flatten(0, 1)  # (B count, C, S, S)
    seconds = time.perf_counter() - start
    with new_file(Path(options.output)) as partial:
        pixels = picture.permute(1, 2, 0)  # (3, H, W) -> (H, W, 3)
        Image.fromarray(pixels.numpy()).save(partial, "png")
    print(f"wrote {options.output}")
    size = f"{model.size} x {model.size} pixels"
    print_note(f"{format_count(len(images), 'image')} of {size} in {seconds:.1f} s")


def read_images(model: PixelModel, path: str | None) -> Tensor | None:
    """Returns images as the model sees them, uint8 (B, C, S, S); None if there is no path."""
    if path is None:
        return None
    files = [Path(path)]
    if Path(path).is_dir():
        names = sorted(file for file in Path(path).iterdir() if not file.name.startswith("."))
        files = [file for file in names if file.suffix.lower() in IMAGE_ENDINGS]
    if not files or not files[0].is_file():
        raise UsageError(f"--input {path} has no image: give a file, or a folder with images in it")
    zero = torch.zeros(1, dtype=torch.int64)
    channels = model.metadata["channels"]
    prepare = ResizeAndCrop.of(model.metadata)
    images = [Records([file], zero, zero).prepared(0, channels, prepare) for file in files]
    return torch.stack(images)
