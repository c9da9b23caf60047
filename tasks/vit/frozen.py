"""Data for networks that are not trained here: of their training, or those that options name."""

from collections.abc import Iterator

from torch import Tensor

from datamodules.base import require_same
from datamodules.images import ImageData
from datamodules.vision.augment import normalise
from tasks.errors import UsageError
from tasks.options import Options, accepted_options, build_from_options, merge_options
from tasks.vit.pretrained_base import Pretrained


def image_data(model: Pretrained, saved: Options, given: Options) -> ImageData:
    """Returns data with the size, the channels and the preprocessing of a model's images.

    Args:
        model: Has a `normalisation`.
        saved: Options `--data` of a training; {}: none are known.
        given: Those on the command line, which take precedence; another path or source takes the
            place of the saved ones.

    Raises:
        UsageError: No option names data, or one is wrong or contradicts the model.
    """
    dataset = given.get("dataset") or {}
    names_data = bool({"path", "source"} & given.keys()) or "name" in dataset
    has_labels = bool(saved) and saved.get("source") != "images"
    if not has_labels and not names_data:
        raise UsageError(
            f"{model.option} {model.source} comes without images with classes: give --data.path or "
            "--data.source"
        )
    saved = accepted_options(ImageData, **saved)
    if names_data:
        saved = merge_options(saved, {"path": None, "source": None})
    config = model.config()
    require_same("image_size", given.get("image_size"), config.image_size)
    require_same("dataset.channels", dataset.get("channels"), config.channels)
    own = {"channels": config.channels, "class_names": None, **model.preprocessing}
    saved = merge_options(saved, {"image_size": config.image_size, "dataset": own})
    data = build_from_options(ImageData, saved, given, "--data.")
    data.crops_training = True
    data.prepare_data()
    return data


def batches(data: ImageData, split: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields all images of a split, normalised, (B, C, H, W), with their targets, (B, ...)."""
    metadata = data.metadata()
    for batch in data.eval_loader(data.dataset(split)):
        batch = data.on_before_batch_transfer(batch, 0)
        yield normalise(batch["image"], metadata["mean"], metadata["std"]), batch["label"]
