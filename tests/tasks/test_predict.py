"""`validate`, `test` and `predict` from a checkpoint alone."""

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from modules.models.vit import ViT, ViTConfig
from tasks.checkpoints.reading import KEY, load_config, net_weights
from tests.tasks.command import checkpoint, picture, run


def table(path: str = "predictions.csv") -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_test_repeats_the_runs_result(
    finished: Path, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert run(f"test --ckpt_path {best} --trainer.limit_test_batches 1") == 0
    out = capsys.readouterr().out
    assert f"{summary['test/acc']:.4f}" in out and f"{summary['test/loss']:.4f}" in out
    assert run(f"validate --ckpt_path {best}") == 0
    assert "val/acc" in capsys.readouterr().out
    assert list(Path().iterdir()) == []


def test_evaluation_against_a_loop_of_our_own(
    best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datamodules.images import ImageData

    saved = torch.load(best, weights_only=True)
    net = ViT(load_config(ViTConfig, saved[KEY]["config"]["model"]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    data, metadata, right, count = ImageData(), saved[KEY]["metadata"], 0, 0
    data.setup("test")
    with torch.no_grad():
        for batch in data.test_dataloader():
            pixels = (batch["image"].float() / 255 - metadata["mean"][0]) / metadata["std"][0]
            right += int((net(pixels).argmax(1) == batch["label"]).sum())
            count += len(pixels)
    assert 350 <= count <= 370
    assert run(f"test --ckpt_path {best}") == 0
    assert f"{right / count:.4f}" in capsys.readouterr().out


def test_predict_a_file(best: Path, finished: Path) -> None:
    picture(8, "L").save("a.png")
    assert run(f"predict --ckpt_path {best} --data.predict_path a.png") == 0
    (row,) = table()
    assert list(row) == ["path", "label", *map(str, range(10))]
    probabilities = [float(row[str(digit)]) for digit in range(10)]
    assert sum(probabilities) == pytest.approx(1, abs=1e-4)
    assert row["label"] == str(probabilities.index(max(probabilities))) and row["path"].endswith(
        "a.png"
    )
    saved = checkpoint(finished, "best")
    metadata = saved[KEY]["metadata"]
    net = ViT(load_config(ViTConfig, saved[KEY]["config"]["model"]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    pixels = torch.tensor(list(Image.open("a.png").tobytes())).reshape(1, 1, 8, 8) / 255
    with torch.no_grad():
        expected = net((pixels - metadata["mean"][0]) / metadata["std"][0]).softmax(-1)[0]
    assert torch.tensor(probabilities) == pytest.approx(expected, abs=1e-5)


def test_predict_any_kind_of_image(best: Path) -> None:
    Path("images/deeper").mkdir(parents=True)
    for mode in ("L", "LA", "RGB", "RGBA", "P", "1", "CMYK"):
        picture(11).convert("L" if mode == "LA" else "RGB").convert(mode).save(
            f"images/deeper/{mode}.tif"
        )
    Image.new("I;16", (9, 7)).save("images/deeper/I16.png")
    assert run(f"predict --ckpt_path {best} --data.predict_path images --run_dir out") == 0
    rows = table("out/predictions.csv")
    assert len(rows) == 8
    assert rows == sorted(rows, key=lambda row: row["path"])
    assert not Path("predictions.csv").exists()


@pytest.mark.parametrize("content", [b"not an image", b"\x89PNG\r\n\x1a\n", b""])
def test_bad_files(content: bytes, best: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("images").mkdir()
    for number in range(2):
        picture(8).save(f"images/{number}.png")
    Path("images/bad.png").write_bytes(content)
    assert run(f"predict --ckpt_path {best} --data.predict_path images") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bad.png" in error and "skip_bad" in error
    assert not Path("predictions.csv").exists()
    assert run(f"predict --ckpt_path {best} --data.predict_path images --data.skip_bad true") == 0
    assert "2 images labelled" in (out := capsys.readouterr().out) and "1 bad files skipped" in out
    assert [Path(row["path"]).name for row in table()] == ["0.png", "1.png"]


@pytest.mark.parametrize(
    "line, named",
    [
        ("predict", "--ckpt_path"),
        ("test", "--ckpt_path"),
        ("validate --ckpt_path none.ckpt", "none.ckpt"),
        ("predict --ckpt_path {best}", "--data.predict_path"),
        ("test --ckpt_path {best} --trainer.num_nodes 2", "torchrun or srun"),
        ("predict --ckpt_path {best} --data.predict_path nowhere", "nowhere"),
        ("predict --ckpt_path {best} --data.predict_path empty", "empty"),
        (
            "test --ckpt_path {best} --model.net.stack.depth 3",
            "--model.net.stack.depth 3 (checkpoint: 1)",
        ),
        ("test --ckpt_path {best} --model.net.image_size 12", "image_size"),
    ],
)
def test_refusals(line: str, named: str, best: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert run(line.format(best=best)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and named in error
    assert [path.name for path in Path().iterdir()] == ["empty"]
