"""`import tessera`: models loaded in Python answer as the commands do."""

import csv
import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tessera
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tasks.checkpoints.reading import VERSION
from tasks.errors import UsageError
from tests.helpers.command import Console, environment, run
from tests.helpers.tiny import picture
from tests.helpers.tiny_models import close

CLASSES = {
    "vit": "ImageClassifier",
    "mae": "MaskedImageModel",
    "bert": "TextClassifier",
    "mlm": "MaskedLanguageModel",
    "lm": "LanguageModel",
    "igpt": "ImageGenerator",
    "seq2seq": "Translator",
}
TEXTS = ["a good film, seen twice", "bad", "a bad film " * 30]


@pytest.mark.parametrize("task", CLASSES)
def test_examples_of_docstrings(task: str, runs: Path) -> None:
    model = tessera.load(runs / task)
    assert type(model).__name__ == CLASSES[task] and task in repr(model)
    names = {"tessera": tessera, "run_folder": runs / task, "photo": picture(20, "L")}
    tests = doctest.DocTestFinder(recurse=False).find(type(model), globs=names)
    tests += doctest.DocTestFinder(recurse=False).find(tessera.load, "load", globs=names)
    if task == "lm":
        names["model"] = model
        tests += doctest.DocTestFinder().find(type(model).intervene, "intervene", globs=names)
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(found.attempted for found in results) >= 3
    assert not any(found.failed for found in results)


@pytest.mark.parametrize("task", CLASSES)
def test_the_network_is_a_plain_module(task: str, runs: Path) -> None:
    model = tessera.load(runs / task, threads=torch.get_num_threads())
    saved = torch.load(runs / task / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    weights = model.net.state_dict()
    assert all(torch.equal(value, saved[f"net.{name}"]) for name, value in weights.items())
    again = tessera.load(runs / task / "checkpoints/best.ckpt")
    assert again.net.state_dict().keys() == weights.keys()


def predictions(file: Path) -> list[dict[str, str]]:
    """Rows of `predictions.csv`."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def same_prediction(found: tessera.Prediction, row: dict[str, str]) -> None:
    """Compares with a row of `predictions.csv`."""
    assert found.label == row["label"]
    for name, probability in found.probabilities.items():
        assert abs(float(row[name]) - probability) < 2e-6
    assert found.top(1) == [(found.label, found.probability)]
    assert found.probability == max(found.probabilities.values())


def test_the_most_likely_classes(runs: Path) -> None:
    model = tessera.load(runs / "bert", kind=tessera.TextClassifier)
    (all_classes, *_) = model.predict(TEXTS)
    (first, *_) = model.predict(TEXTS, top_k=1)
    assert isinstance(all_classes, tessera.Prediction) and isinstance(first, tessera.Prediction)
    assert len(all_classes.probabilities) == 2
    assert first.probabilities == {first.label: first.probability}
    assert (first.label, first.probability) == (all_classes.label, all_classes.probability)
    digits = tessera.load(runs / "vit", kind=tessera.ImageClassifier)
    image = picture(9, "L")
    found = digits.predict(image, top_k=3)
    assert isinstance(found, tessera.Prediction)
    assert [*found.probabilities.items()] == digits.predict(image).top(3)
    for wrong in (0, 3):
        with pytest.raises(tessera.UsageError, match=f"top_k {wrong}"):
            model.predict("good", top_k=wrong)


def test_images_are_labelled_as_by_predict(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for number, mode in enumerate(("L", "RGB", "I;16")):
        image = picture(13 + number, "L" if mode == "I;16" else mode)
        if mode == "I;16":
            image = Image.fromarray(np.asarray(image).astype(np.uint16) * 256)
        image.resize((30, 17)).save(f"photos/{number}.png")
    ckpt = runs / "vit/checkpoints/best.ckpt"
    assert run(f"predict --ckpt_path {ckpt} --input photos --output out.csv") == 0
    rows = predictions(Path("out.csv"))
    model = tessera.load(ckpt)
    images = [Path(row["path"]) for row in rows]
    for row, found in zip(rows, model.predict(images, batch_size=2), strict=True):
        same_prediction(found, row)
        same_prediction(model.predict(row["path"]), row)
        same_prediction(model.predict(Image.open(row["path"])), row)
    turned = Image.open(images[0])
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned.save("turned.png", exif=exif)
    assert model.predict(Image.open("turned.png")) == model.predict("turned.png")
    assert model.predict("turned.png") != model.predict(images[0])
    grey = np.asarray(Image.open(images[0]))  # (H, W)
    tensor = torch.from_numpy(grey.copy())[None]  # (C, H, W)
    for image in (grey, grey[..., None], tensor):
        same_prediction(model.predict(image), rows[0])
    assert len(model.predict(np.stack([grey[..., None]] * 3))) == 3
    vectors = model.embed(images)
    close(
        model.net.head(vectors).softmax(-1)[0].max(), torch.tensor(model.predict(grey).probability)
    )
    assert vectors.shape == (3, 32)
    close(vectors[0], model.embed(grey))  # other batches round differently
    weights, queries, keys = model.attention(grey)
    assert weights.shape == (1, 2, len(queries), len(keys))
    close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    close(model.attention_map(grey).sum(), torch.ones(()))
    with pytest.raises(UsageError, match="stage is 1, but this network has 1 stage"):
        model.attention(grey, stage=1)


def test_texts_are_labelled_as_by_predict(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text("\n".join(TEXTS))
    ckpt = runs / "bert/checkpoints/best.ckpt"
    line = f"predict --ckpt_path {ckpt} --input lines.txt --output out.csv"
    assert run(line, "bert") == 0
    model = tessera.load(ckpt)
    with pytest.warns(UserWarning, match="1 of 3 texts"):
        found = model.predict(TEXTS, batch_size=2)
    for one, row in zip(found, predictions(Path("out.csv")), strict=True):
        same_prediction(one, row)
    again = model.predict(text for text in TEXTS[:2])
    assert [one.label for one in again] == [one.label for one in found[:2]]
    close([one.probability for one in again], [one.probability for one in found[:2]])
    assert model.predict([]) == []
    table = pd.DataFrame({"text": TEXTS[:2]}, index=[7, 3])  # a column has an index of its own
    assert [one.label for one in model.predict(table["text"])] == [one.label for one in again]
    weights, tokens, _ = model.attention(TEXTS[0])
    assert weights.shape[:2] == (2, 2) and tokens[0] == "[CLS]" and len(tokens) == weights.shape[2]
    vector = model.embed(TEXTS[1])
    probabilities = model.net.head(model.net.pooler(vector[None])).softmax(-1)[0]  # (K,)
    close(probabilities.max(), torch.tensor(model.predict(TEXTS[1]).probability))


def test_masks_are_filled_with_the_most_likely_tokens(runs: Path) -> None:
    model = tessera.load(runs / "mlm")
    first, second = model.fill_mask("a [MASK] film, [MASK] twice", top_k=3)
    assert len(first) == len(second) == 3
    ids = model.tokenizer.encode_batch(["a", "film,", "twice"])
    mask = model.tokenizer.special_id("mask")
    inputs = model.tokenizer.build_inputs([*ids[0], mask, *ids[1], mask, *ids[2]], 48).ids
    logits = model.net(torch.tensor([inputs]))  # (N, V)
    places = [i for i, token in enumerate(inputs) if token == mask]
    for place, found in zip(places, (first, second), strict=True):
        best = logits[place].softmax(-1).topk(3)
        close([one.probability for one in found], best.values.tolist())
        tokens = [model.tokenizer.decode([token]) for token in best.indices.tolist()]
        assert [one.token for one in found] == tokens
    assert all(f" {one.token} ".replace(" ##", "") in one.text for one in (*first, *second))
    assert all(one.text.startswith("a") and "film, [MASK] twice" in one.text for one in first)
    assert all(one.text.startswith("a [MASK] film,") for one in second)
    with pytest.raises(UsageError, match="MASK"):
        model.fill_mask("a film")
    with pytest.raises(UsageError, match="top_k"):
        model.fill_mask("a [MASK]", top_k=0)


def test_texts_are_generated_as_by_the_command(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tessera.load(runs / "lm")
    ckpt = runs / "lm/checkpoints/best.ckpt"
    for options in (
        {"temperature": 0.0},
        {"seed": 3, "top_k": 20},
        {"beams": 2, "temperature": 0.0},
    ):
        options |= {"max_new_tokens": 9}
        flags = " ".join(f"--{name} {value}" for name, value in options.items())
        line = f'generate --ckpt_path {ckpt} --prompt "The" --prompt "A list" {flags}'
        objects = Console(capsys).objects(line, "lm")
        found = model.generate(["The", "A list"], **options)
        assert found == [entry["text"] for entry in objects]
        assert model.generate("The", **options) == found[0]
        assert model.generate(["The", "A list"], batch_size=1, **options) == found
    text = model.generate("The", temperature=0.0, max_new_tokens=9)
    letter = text[len(text) // 2]
    stopped = model.generate("The", letter, temperature=0.0, max_new_tokens=9)
    assert stopped == text.partition(letter)[0]
    for option in ({"num_beams": 2}, {"samples": 2}, {"nonsense": 1}):
        with pytest.raises(UsageError, match=next(iter(option))):
            model.generate("The", **option)
    line = f"score --ckpt_path {ckpt} --input {runs / 'texts/0.txt'} --stride 3 --json"
    wanted = json.loads(Console(capsys).printed(line, "lm")[0])
    score = model.score((runs / "texts/0.txt").read_text(), stride=3)
    for name in ("loss", "perplexity", "bits_per_byte", "tokens"):
        assert getattr(score, name) == pytest.approx(wanted[name], rel=1e-4), name
    texts = ["The", (runs / "texts/0.txt").read_text(), "A list of texts, of any length"]
    several = model.score(texts, stride=3, batch_size=5)
    for text, one in zip(texts, several, strict=True):
        alone = model.score(text, stride=3)
        assert one.tokens == alone.tokens
        close([one.loss, one.perplexity, one.bits_per_byte],
              [alone.loss, alone.perplexity, alone.bits_per_byte], rtol=1e-4)  # fmt: skip
    assert model.score([]) == []
    with pytest.raises(UsageError, match="batch_size"):
        model.score(texts, batch_size=0)
    weights, tokens, _ = model.attention("The list")
    assert weights.shape[-1] == len(tokens) and not weights.triu(1).any()
    assert model.embed(["The list", "A"]).shape == (2, 32)


def test_sentences_are_translated_as_by_the_command(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tessera.load(runs / "seq2seq")
    ckpt = runs / "seq2seq/checkpoints/best.ckpt"
    texts = ["two three", "", "nine ten one's"]
    lines = " ".join(f'--text "{text}"' for text in texts)
    for beams in (1, 5):
        line = f"translate --ckpt_path {ckpt} {lines} --beams {beams} --max_new_tokens 12"
        objects = Console(capsys).objects(line, "seq2seq")
        found = model.translate(texts, beams=beams, max_new_tokens=12)
        assert found == [entry["translation"] for entry in objects]
    score = model.score("two three", "TWO THREE")
    source = torch.tensor(model.model.tokenizer.encode_sources(["two three"], 24)[0])
    pair = model.model.tokenizer
    target = pair.build_target(pair.target.encode_batch(["TWO THREE"])[0], 24)
    logits = model.net.logits(model.net(source, torch.tensor([target[:-1]])))[0]  # (N, V)
    close(
        torch.tensor(score.loss),
        torch.nn.functional.cross_entropy(logits, torch.tensor(target[1:])),
    )
    weights, queries, keys = model.attention("two three", "TWO THREE")
    assert weights.shape[2:] == (len(queries), len(keys)) and queries[0] == "TWO"
    assert model.embed(["two", "three four"]).shape == (2, 32)


@pytest.mark.parametrize(("task", "method"), [("bert", "predict"), ("lm", "generate")])
def test_int8_and_packed_weights(task: str, method: str, runs: Path) -> None:
    plain = tessera.load(runs / task)
    for options in ({"packed": True}, {"quantize": "int8"}):
        model = tessera.load(runs / task, device="cpu", **options)
        if task == "bert":
            assert abs(model.predict("good").probability - plain.predict("good").probability) < 0.05
        else:
            assert isinstance(model.generate("The", max_new_tokens=2), str)


@pytest.mark.parametrize("task", CLASSES)
def test_exports_are_loaded(task: str, runs: Path, tmp_path: Path) -> None:
    ckpt = runs / task / "checkpoints/best.ckpt"
    original = tessera.load(ckpt)
    for format in ("safetensors", *["hf"] * (task == "lm")):
        output = tmp_path / f"out{'.safetensors' if format == 'safetensors' else ''}"
        assert run(f"export --ckpt_path {ckpt} --format {format} --output {output}", task) == 0
        model = tessera.load(output)
        assert type(model).__name__ == CLASSES[task]
        weights = original.net.state_dict()
        close(model.net.state_dict().values(), weights.values(), atol=0)
        if format == "safetensors":
            assert model.metadata == original.metadata


def test_an_export_with_a_damaged_header(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    assert run(f"export --ckpt_path {runs}/bert --format safetensors --output {out}", "bert") == 0
    state = load_file(out)
    header = {"task": "bert", "version": str(VERSION), "config": "{}", "metadata": "{}"}
    for changed, named in (
        ({"config": "["}, "header"),
        ({"version": "1"}, "version"),
        ({"task": "other"}, "other"),
    ):
        save_file(state, out, header | changed)
        with pytest.raises(UsageError, match=named):
            tessera.load(out)


def test_bad_sources(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "missing", tmp_path / "empty", "timm/no_such_model", runs / "texts"):
        with pytest.raises(UsageError):
            tessera.load(source)
    with pytest.raises(UsageError, match="threads"):
        tessera.load(runs / "vit", threads=0)
    model = tessera.load(runs / "vit")
    wrong: list[Any] = [np.zeros((4, 4)), torch.zeros(3, 4, 4, dtype=torch.uint8), [3]]
    for image in wrong:
        with pytest.raises(UsageError):
            model.predict(image)
    with pytest.raises(UsageError, match=r"not ndarray of float64 and shape \(4, 4\)"):
        model.predict(np.zeros((4, 4)))
    with pytest.raises(UsageError, match=r"1 channel, not 8.*\(H, W, C\).*\(C, H, W\)"):
        model.predict(np.zeros((3, 8, 8), dtype=np.uint8))
    with pytest.raises(TypeError):
        model.predict(3)
    with pytest.raises(tessera.DataError, match=r"^images\[2\]: "):
        model.predict([picture(20, "L"), picture(20, "L"), b"bad"], batch_size=2)
    texts = tessera.load(runs / "bert")
    for table in ([3], {"text": ["a"]}, pd.DataFrame({"text": ["a"]})):
        with pytest.raises(TypeError):
            texts.predict(table)
    assert texts.embed([]).shape == (0, 0)
    for name in ("gpt2", "org/model"):
        with pytest.raises(UsageError, match=f"hf/{name}"):
            tessera.load(name)
    for device in ("cuad", "gpu", "cuda:99"):
        with pytest.raises(UsageError, match=f"^device is '{device}'.*auto or cpu") as caught:
            tessera.load(runs / "vit", device=device)
        assert "--device" not in str(caught.value)
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph/model.onnx").touch()
    for graph in (tmp_path / "graph/model.onnx", tmp_path / "graph"):
        with pytest.raises(UsageError, match=f"'{graph}' .*onnxruntime.*checkpoint"):
            tessera.load(graph)
    with pytest.raises(tessera.DataError, match="missing.png cannot be read"):
        model.predict("missing.png")
    Image.new("1", (14_000, 14_000)).save(tmp_path / "huge.png")
    with pytest.raises(tessera.DataError, match="huge.png has 196,000,000 pixels.*shrink it"):
        model.predict([tmp_path / "huge.png"])
    threads = torch.get_num_threads()
    with pytest.raises(UsageError):
        tessera.load(tmp_path / "missing", threads=threads + 1)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("task", ["vit", "igpt"])
def test_a_bad_image_of_a_list_is_named_and_an_open_file_is_refused(
    task: str, runs: Path, tmp_path: Path
) -> None:
    model: Any = tessera.load(runs / task)
    picture(20, "L").save(tmp_path / "a.png")
    good = (tmp_path / "a.png").read_bytes()
    with pytest.raises(tessera.DataError, match=r"^images\[3\]: a sample of 3 bytes"):
        model.embed([good, good, good, b"bad"])
    with (tmp_path / "a.png").open("rb") as file:
        with pytest.raises(UsageError, match="open file.*bytes"):
            model.embed(file)
        with pytest.raises(UsageError, match=r"^images\[0\]: .*bytes"):
            model.embed([file])


def test_methods_of_one_input_take_no_list(runs: Path) -> None:
    for task in CLASSES:
        model: Any = tessera.load(runs / task)
        inputs = [picture(20, "L")] * 2 if task in ("vit", "mae", "igpt") else ["The", "The"]
        methods = [model.complete] if task == "igpt" else [model.attention]
        if task == "vit":
            methods += [model.attention_map]
        elif task == "mae":
            methods += [model.reconstruct]
        elif task == "mlm":
            methods += [model.fill_mask]
        elif task == "lm":
            methods += [model.stream]
        elif task == "seq2seq":
            methods += [
                lambda texts, model=model: model.score(texts, "TWO"),
                lambda texts, model=model: model.score("two", texts),
            ]
        for method in methods:
            with pytest.raises(TypeError, match="one .* at a time, but this is of type list"):
                method(inputs)


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import tessera; "
        "assert time.perf_counter() - start < 0.3; dir(tessera); "
        "assert not {'torch', 'numpy', 'pytorch_lightning'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_a_model_of_another_kind_is_refused(runs: Path) -> None:
    model = tessera.load(runs / "bert", kind=tessera.TextClassifier)
    assert model.predict("good").label in model.class_names
    with pytest.raises(UsageError, match="of class TextClassifier, not Translator"):
        tessera.load(runs / "bert", kind=tessera.Translator)
