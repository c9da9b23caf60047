"""`validate`, `test` and `predict` from a checkpoint alone."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from datamodules.images import ImageData
from modules.models.vit import ViT, ViTConfig
from tasks.checkpoints.reading import KEY, load_config, net_weights
from tests.tasks.command import picture, run


def table(path: str = "predictions.csv") -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def logits(checkpoint: Path, pixels: Tensor) -> Tensor:
    """What a checkpoint's network says about images (B, C, H, W) of uint8."""
    saved: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    metadata = saved[KEY]["metadata"]
    net = ViT(load_config(ViTConfig, saved[KEY]["config"]["model"]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    with torch.no_grad():
        return net((pixels / 255 - metadata["mean"][0]) / metadata["std"][0])


def test_evaluation_repeats_the_results_of_the_run(
    finished: Path, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert run(f"test --ckpt_path {best} --trainer.limit_test_batches 1") == 0
    out = capsys.readouterr().out
    assert f"{summary['test/acc']:.4f}" in out and f"{summary['test/loss']:.4f}" in out
    assert run(f"validate --ckpt_path {best}") == 0
    assert "val/acc" in capsys.readouterr().out
    assert list(Path().iterdir()) == []


def test_accuracy_of_the_test_split(best: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ImageData()
    data.setup("test")
    right = []
    for batch in data.test_dataloader():
        right += (logits(best, batch["image"]).argmax(1) == batch["label"]).tolist()
    assert 350 <= len(right) <= 370
    assert run(f"test --ckpt_path {best}") == 0
    assert f"{sum(right) / len(right):.4f}" in capsys.readouterr().out


def test_probabilities_of_a_file(best: Path) -> None:
    picture(8, "L").save("a.png")
    assert run(f"predict --ckpt_path {best} --data.predict_path a.png") == 0
    (row,) = table()
    assert list(row) == ["path", "label", *map(str, range(10))] and row["path"].endswith("a.png")
    probabilities = torch.tensor([float(row[str(digit)]) for digit in range(10)])
    pixels = torch.tensor(list(Image.open("a.png").tobytes())).reshape(1, 1, 8, 8)
    expected = logits(best, pixels).softmax(-1)[0]
    torch.testing.assert_close(probabilities, expected, atol=1e-5, rtol=0)
    assert row["label"] == str(int(expected.argmax()))


def test_any_kind_of_image(best: Path) -> None:
    Path("images/deeper").mkdir(parents=True)
    for mode in ("L", "LA", "RGB", "RGBA", "P", "1", "CMYK"):
        image = picture(11).convert("L" if mode == "LA" else "RGB").convert(mode)
        image.save(f"images/deeper/{mode}.tif")
    Image.new("I;16", (9, 7)).save("images/deeper/I16.png")
    assert run(f"predict --ckpt_path {best} --data.predict_path images --run_dir out") == 0
    paths = [row["path"] for row in table("out/predictions.csv")]
    assert len(paths) == 8 and paths == sorted(paths)
    assert not Path("predictions.csv").exists()


@pytest.mark.parametrize("content", [b"not an image", b""])
def test_bad_files(content: bytes, best: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("images").mkdir()
    for number in range(2):
        picture(8).save(f"images/{number}.png")
    Path("images/bad.png").write_bytes(content)
    line = f"predict --ckpt_path {best} --data.predict_path images"
    assert run(line) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bad.png" in error and "skip_bad" in error
    assert not Path("predictions.csv").exists()
    assert run(f"{line} --data.skip_bad true") == 0
    assert "1 bad files skipped" in capsys.readouterr().out
    assert [Path(row["path"]).name for row in table()] == ["0.png", "1.png"]
