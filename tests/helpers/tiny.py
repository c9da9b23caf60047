"""Short runs, a tiny model of each task, and tiny data."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

SHORT = (
    "--trainer.limit_train_batches 4 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    "--trainer.max_epochs 2 --trainer.log_every_n_steps 1 --model.net.stack.depth 1"
)
FEW_STEPS = (
    "--trainer.max_epochs 1 --trainer.limit_train_batches 3 --trainer.limit_val_batches 1 "
    "--trainer.limit_test_batches 1 --trainer.log_every_n_steps 1"
)
NO_UPDATES = "--model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"
NET = "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2"
SMALL_LM = (
    f"{NET} --model.samples.every null --model.samples.generation.max_new_tokens 8 "
    "--data.batch_size 4 --data.max_length 32 --data.tokenizer.min_frequency 1 "
    "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"
)
SMALL_S2S = " ".join(
    f"--model.net.{side}.width 32 --model.net.{side}.depth 2 --model.net.{side}.heads 2 "
    f"--model.net.{side}.mlp_width 64 --model.net.{side}.dropout 0"
    for side in ("encoder", "decoder")
)
SMALL_S2S += (
    " --data.batch_size 16 --data.max_length 24 --data.tokenizer.vocabulary 60 "
    "--data.tokenizer.min_frequency 1 --data.tokenizer.kind whitespace --model.optimizer.lr 5e-3 "
    "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"
)
PAIRS = "--data.path pairs --data.languages en-up"
TINY = {  # a small model of each task, on the data of `write_data`
    "vit": f"{NET} --model.net.stack.depth 1 --data.batch_size 16",
    "mae": f"{NET} --model.net.stack.depth 1 --model.net.decoder.depth 1 --data.batch_size 16",
    "bert": f"{NET} --data.tokenizer.vocabulary 300 --data.batch_size 8",
    "mlm": f"--preset tiny {NET} --data.source hub --data.path hub --data.max_length 48 "
    "--data.batch_size 8 --data.tokenizer.vocabulary 70",
    "lm": f"{SMALL_LM} --data.path texts --data.tokenizer.vocabulary 400",
    "igpt": f"{NET} --data.batch_size 16 --model.pictures.samples 2 --model.pictures.completions 1",
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}


class Malicious:
    """Unpickling it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("pwned").touch, ()


def picture(side: int, mode: str = "RGB") -> Image.Image:
    """A random picture."""
    pixels = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).convert(mode)


def write_images(
    folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 4, side: int = 12
) -> Path:
    """`train/CLASS/*.png` below `folder`."""
    for name in classes:
        (folder / "train" / name).mkdir(parents=True)
        for number in range(count):
            picture(side).save(folder / "train" / name / f"{number}.png")
    return folder


def write_reviews(
    folder: Path,
    copies: int = 20,
    names: tuple[str, ...] = ("neg", "pos"),
    words: tuple[str, str] = ("bad", "good"),
) -> Path:
    """Reviews in the hub's schema, negative and positive in turn, with unlabelled ones; `names` of
    their classes, `words` that tell them apart.
    """
    from datasets import ClassLabel, Dataset, Features, Value

    folder.mkdir()
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(names))})
    for split, count in (("train", copies), ("test", 4), ("unsupervised", 4)):
        texts = [f"a {word} film number {i}, seen twice" for i in range(count) for word in words]
        labels = [-1] * len(texts) if split == "unsupervised" else [0, 1] * count
        rows = Dataset.from_dict({"text": texts, "label": labels}, features=features)
        rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def write_corpus(folder: Path, count: int = 8) -> Path:
    """Texts of Python's reference, one in a file each."""
    from datamodules.embedded.reference import documents

    folder.mkdir()
    for number, text in enumerate(sorted(documents()["val"], key=len)[:count]):
        (folder / f"{number}.txt").write_text(text[:2000])
    return folder


def write_pairs(
    folder: Path, count: int = 160, test: str = "test", languages: tuple[str, str] = ("en", "up")
) -> Path:
    """Aligned files of three splits: up to six numbers in words, and the same in capitals."""
    from random import Random

    folder.mkdir()
    words = ["one's", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    rng = Random(0)
    for split, size in (("train", count), ("val", 16), (test, 12)):
        texts = [
            " ".join(rng.choices(words, k=1 + int(6 * rng.random()))) + "\n" for _ in range(size)
        ]
        for language, way in zip(languages, (str, str.upper), strict=True):
            (folder / f"{split}.{language}").write_text("".join(map(way, texts)))
    return folder


def write_data(folder: Path = Path(), texts: int = 8) -> Path:
    """The data that `TINY` names."""
    write_corpus(folder / "texts", texts)
    write_pairs(folder / "pairs")
    write_reviews(folder / "hub")
    return folder
