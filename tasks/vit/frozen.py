"""Data for networks that are not trained here: of their training, or those that options name."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from datamodules.images import ImageData
from datamodules.utils.errors import require_same
from datamodules.vision.augment import normalise
from tasks.errors import UsageError
from tasks.options import Options, accepted_options, build_from_options, merge_options, names_data


def image_data(named: str, own: Mapping[str, Any], saved: Options, given: Options) -> ImageData:
    """Returns data with the size, the channels and the preprocessing of a model's images.

    Args:
        named: The option and the model, for messages.
        own: `image_size`, `channels` and what is known of `mean`, `std`, `interpolation` and
            `crop_pct` of the model.
        saved: Options `--data` of a training; {}: none are known.
        given: Those on the command line, which take precedence; another path or source takes the
            place of the saved ones.

    Raises:
        UsageError: No option names data, or one is wrong or contradicts the model.
    """
    dataset = given.get("dataset") or {}
    is_named = names_data(given)
    has_labels = bool(saved) and saved.get("source") != "images"
    if not has_labels and not is_named:
        raise UsageError(
            f"{named} comes without images with classes: give --data.path or --data.source"
        )
    saved = accepted_options(ImageData, **saved)
    if is_named:
        saved = merge_options(saved, {"path": None, "source": None, "label_fraction": 1.0})
    size = own["image_size"]
    require_same("image_size", given.get("image_size"), size)
    require_same("dataset.channels", dataset.get("channels"), own["channels"])
    names = ("channels", "mean", "std", "interpolation", "crop_pct")
    known = {name: own[name] for name in names if name in own}
    saved = merge_options(saved, {"image_size": size, "dataset": {**known, "class_names": None}})
    data = build_from_options(ImageData, saved, given, "--data.")
    data.crops_training = True
    data.source.problem_option = "--data.dataset.problem_type"
    data.source.recorded_by = None if is_named else named
    data.prepare_data()
    return data


def batches(data: ImageData, split: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields all images of a split, normalised, (B, C, H, W), with their targets, (B, ...)."""
    metadata = data.metadata()
    for batch in data.eval_loader(data.dataset(split)):
        batch = data.on_before_batch_transfer(batch, 0)
        yield normalise(batch["image"], metadata["mean"], metadata["std"]), batch["label"]
