"""Your own images: fine-tune a pretrained Vision Transformer, then use it in Python.

    python -m configs.examples.own_images [FOLDER]

The script writes 120 drawings in images/train/CLASS/, a pretrained model, and the run into the
folder, by default `runs/own_images`. It stops if the drawings are there already: remove the folder,
or give another. Nothing is downloaded. For photographs, start from a published model, as with
`--model.pretrained timm/vit_tiny_patch16_224`; here a model of digits takes its place.
"""

import random
import shlex
import sys
from pathlib import Path

import numpy as np
import tessera
from PIL import Image, ImageDraw

from tasks.cli.main import main as command_line
from tasks.vit.__main__ import APP

CLASSES = ("circle", "cross", "square")
SIDE = 32  # pixels
DRAWINGS = 40  # of each class


def drawing(shape: str, chance: random.Random) -> Image.Image:
    """One shape of random size and place, white on black."""
    image = Image.new("L", (SIDE, SIDE))
    size = chance.randint(14, 22)
    left, top = (chance.randint(2, SIDE - size - 2) for _ in range(2))
    right, bottom = left + size, top + size
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), outline=255, width=3)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), outline=255, width=3)
    else:
        draw.line((left, top, right, bottom), fill=255, width=3)
        draw.line((left, bottom, right, top), fill=255, width=3)
    return image


def write_drawings(folder: Path) -> None:
    """Writes one folder for each class, which is all that `--data.source folder` needs."""
    chance = random.Random(0)
    for shape in CLASSES:
        (folder / "train" / shape).mkdir(parents=True)
        for number in range(DRAWINGS):
            drawing(shape, chance).save(folder / "train" / shape / f"{number}.png")


def run(line: str) -> None:
    """Runs `python -m tasks.vit LINE` in this process."""
    print(f"\n$ python -m tasks.vit {line}", flush=True)
    code = command_line(APP, shlex.split(line))
    if code:
        sys.exit(code)


def main(folder: Path) -> None:
    images = folder / "images"
    if images.exists():
        sys.exit(f"error: {images} exists: give another FOLDER")
    write_drawings(images)
    place = shlex.quote(str(folder))  # it may have spaces

    # Pretraining. With these options the ViT has the patch embedding and learned positions of the
    # paper (Dosovitskiy 2021, equation 1), which timm's models have, too.
    paper = "--model.net.stem patch --model.net.position learned"
    run(f"fit --preset digits {paper} --trainer.max_epochs 8 --run_dir {place}/digits")
    print("\nThe accuracy is low, as this pretraining took a moment only: it is a start.")
    weights = f"{place}/digits_timm"  # a folder with weights and config.json
    run(f"export --ckpt_path {place}/digits --format timm --output {weights}")

    # Fine-tuning. The architecture comes with the weights. The classifier is initialised anew, as
    # the classes differ. Positions are interpolated, as the images are larger: 16 x 16 pixels
    # instead of 8 x 8 (Dosovitskiy 2021, section 3.2).
    options = "--model.net.image_size 16 --data.batch_size 16 --trainer.max_epochs 20"
    data = f"--data.source folder --data.path {place}/images --data.dataset.val_fraction 0.2"
    run(f"fit {data} --model.pretrained {weights} {options} --run_dir {place}/run")

    # The model in Python. It knows its classes, image size and normalisation.
    model = tessera.load(folder / "run")
    print(f"\n{model}")
    chance = random.Random(1)  # other drawings than those above
    for shape in CLASSES:
        prediction = model.predict(drawing(shape, chance))
        answers = ", ".join(f"{name} {share:.2f}" for name, share in prediction.top(2))
        print(f"a {shape:<6} is taken for a {prediction.label} ({answers})")

    # Attention weights of each layer and head (Vaswani 2017, equation 1), and their product over
    # the layers, which says how much each patch counts: attention rollout (Abnar and Zuidema 2020).
    image = drawing("cross", chance)
    print("attention:", tuple(model.attention(image).weights.shape), "layers, heads, queries, keys")
    print("  the drawing        its attention map")
    heat = model.attention_map(image).numpy()  # (rows of patches, columns of patches)
    pixels = np.asarray(image.resize(heat.shape, Image.Resampling.BOX))  # (rows, columns), too
    for both in zip(pixels / pixels.max(), heat / heat.max(), strict=True):
        halves = ["".join(" .:+#"[min(4, int(5 * value))] * 2 for value in row) for row in both]
        print("  " + " | ".join(halves))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_images"))
