"""`export --format hf` of runs: equal logits of the same picture there and back here."""

import json
from pathlib import Path

import pytest
import tessera
import torch
import transformers

from tests.helpers.command import Console, run
from tests.helpers.images import random_image, save_image
from tests.helpers.tiny import write_images

FIT = (
    "fit --model.net.patch_size 8 --model.net.stack.width 48 --model.net.stack.depth 2 "
    "--model.net.stack.heads 4 --trainer.max_epochs 1 --trainer.limit_test_batches 0 "
    "--data.batch_size 4"
)


@pytest.mark.parametrize("crop_pct", [1.0, 0.85])
@pytest.mark.parametrize("token", ["false", "true"])
def test_a_run_gives_equal_logits_of_the_same_picture(
    crop_pct: float, token: str, console: Console
) -> None:
    """From a file to logits, with each library's own preparation of pictures."""
    write_images(Path("images"), ("cat", "dog", "owl"), side=32)
    data = f"--data.source folder --data.path images --data.dataset.crop_pct {crop_pct}"
    net = f"--model.net.image_size 32 --model.net.distillation_token {token}"
    assert run(f"{FIT} {data} {net} --run_dir r") == 0
    out, _ = console.printed("export --ckpt_path r --format hf --output out")
    assert "ForImageClassification" in out
    theirs = transformers.AutoModelForImageClassification.from_pretrained("out").eval()
    processor = transformers.AutoImageProcessor.from_pretrained("out")
    models = [tessera.load(name, kind=tessera.ImageClassifier) for name in ("r", "out")]
    for seed, size in enumerate([(32, 32), (64, 48), (50, 90), (20, 20)]):
        picture = random_image(seed, size)
        picture.save(f"{seed}.png")
        inputs = processor(picture, return_tensors="pt")
        assert inputs["pixel_values"].shape == (1, 3, 32, 32)
        with torch.no_grad():
            expected = theirs(**inputs).logits[0]  # (K,)
        for model in models:
            torch.testing.assert_close(model.logits(f"{seed}.png"), expected, atol=1e-5, rtol=0)
            best = theirs.config.id2label[int(expected.argmax())]
            assert next(iter(model.predict(f"{seed}.png").probabilities)) == best


def test_grey_pictures_and_numbers(console: Console) -> None:
    rows = ["file_name,label"]
    for i in range(8):
        save_image(Path(f"{i}.png"), seed=i, size=(16, 16), mode="L")
        rows.append(f"{i}.png,{200 + i}")
    Path("train.csv").write_text("\n".join(rows))
    kind = "--data.path train.csv --model.problem_type regression --model.net.image_size 16"
    assert run(f"{FIT} {kind} --run_dir r") == 0
    console.printed("export --ckpt_path r --format hf --output out")
    theirs = transformers.AutoModelForImageClassification.from_pretrained("out").eval()
    assert theirs.config.problem_type == "regression" and theirs.config.num_labels == 1
    processor = transformers.AutoImageProcessor.from_pretrained("out")
    inputs = processor(random_image(3, (16, 16), "L"), return_tensors="pt")
    assert json.loads(Path("out/preprocessor_config.json").read_text())["do_convert_rgb"] is False
    with torch.no_grad():
        expected = float(theirs(**inputs).logits)
    assert 150 < expected < 260
    for source in ("r", "out"):
        assert tessera.load(source).predict("3.png").value == pytest.approx(expected, rel=1e-5)


def test_a_refused_export_names_what_to_do(console: Console) -> None:
    write_images(Path("images"), side=32)
    data = "--data.source folder --data.path images --model.net.image_size 32"
    assert run(f"{FIT} {data} --model.net.pool mean --run_dir r") == 0
    told = ("Hugging Face has no such model", "pool cls", "--format timm, onnx or safetensors")
    console.refused("export --ckpt_path r --format hf --output out", *told)
    assert not Path("out").exists()
    told = ("out.onnx", "the format hf is a folder")
    console.refused("export --ckpt_path r --format hf --output out.onnx", *told)
