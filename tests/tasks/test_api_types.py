"""mypy knows the types of `import tessera`: one input has one result, a list has a list."""

import re
from pathlib import Path

import pytest
from mypy import api

from tests.helpers.command import ROOT

USER_SCRIPT = """
from collections.abc import Iterator
from pathlib import Path
from typing import assert_type

import numpy as np
import tessera
from PIL import Image
from torch import Tensor

Answer = tessera.Prediction | tessera.LabelSet | tessera.Number
pixels = np.zeros((8, 8), dtype=np.uint8)

images = tessera.load("runs/vit", kind=tessera.ImageClassifier)
assert_type(images, tessera.ImageClassifier)
assert_type(images.predict("photo.png"), Answer)
assert_type(images.predict(Path("photo.png")), Answer)
assert_type(images.predict(b"..."), Answer)
assert_type(images.predict(Image.open("photo.png")), Answer)
assert_type(images.predict(["a.png", "b.png"], batch_size=2), list[Answer])
assert_type(images.predict([pixels, pixels]), list[Answer])
assert_type(images.predict(["a.png"], top_k=1), list[Answer])
assert_type(images.predict(pixels), Answer | list[Answer])  # (H, W), or (B, H, W, C)
assert_type(images.embed(["a.png", "b.png"]), Tensor)
assert_type(images.attention("a.png"), tessera.Attention)
images.predict(3)  # E: call-overload

texts = tessera.load("runs/bert", device="cpu", kind=tessera.TextClassifier)
assert_type(texts.predict("good"), Answer)
assert_type(texts.predict(["good", "bad"]), list[Answer])
assert_type(texts.predict(line for line in ("good", "bad")), list[Answer])
assert_type(texts.embed("good"), Tensor)
assert_type(texts.attention("good").queries, list[str])
texts.predict([3])  # E: list-item

masked = tessera.load("runs/mlm", kind=tessera.MaskedLanguageModel)
assert_type(masked.fill_mask("a [MASK]"), list[list[tessera.Filling]])

language = tessera.load("runs/lm", kind=tessera.LanguageModel)
assert_type(language.generate("The", seed=1), str)
assert_type(language.generate(), str)
assert_type(language.generate(["The", "A"], seed=1), list[str])
assert_type(language.stream("The"), Iterator[str])
assert_type(language.score("The text"), tessera.Score)
assert_type(language.score(["The text"]), list[tessera.Score])
assert_type(language.net.max_length, int)
language.generate("The", max_tokens=3)  # E: call-overload
language.stream("The", seed="one")  # E: arg-type

translator = tessera.load("runs/seq2seq", kind=tessera.Translator)
assert_type(translator.translate("two", beams=2), str)
assert_type(translator.translate(["two", "three"]), list[str])
assert_type(translator.score("two", "zwei"), tessera.Score)
translator.translate("two", beams=2.5)  # E: call-overload

assert_type(tessera.__version__, str)
tessera.laod("runs/any")  # E: attr-defined
found = tessera.load("runs/any")
found.generate("The")  # E: union-attr
if isinstance(found, tessera.LanguageModel):
    assert_type(found.generate("The"), str)
"""

OPTIONS = ["--python-version", "3.11", "--ignore-missing-imports", "--follow-imports", "silent"]


def link_packages(folder: Path) -> None:
    """Lets mypy find the packages in a folder, without an installation."""
    for package in ("tasks", "modules", "datamodules"):
        (folder / package).symlink_to(ROOT / package)
    (folder / "tessera").symlink_to(ROOT / "tasks/tessera")


@pytest.mark.slow
def test_the_example_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes mypy --strict, the narrowing of what `predict` returns too."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "tasks/README.md").read_text(), re.S)
    (example,) = [text for text in examples if "isinstance(prediction, tessera.LabelSet)" in text]
    (tmp_path / "script.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    link_packages(tmp_path)
    printed, problems, code = api.run([*OPTIONS, "--strict", "script.py"])
    assert (code, problems) == (0, ""), printed


@pytest.mark.slow
def test_a_users_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only errors are those that its comments announce."""
    (tmp_path / "script.py").write_text(USER_SCRIPT)
    monkeypatch.chdir(tmp_path)  # away from the settings in pyproject.toml
    link_packages(tmp_path)
    printed, problems, _ = api.run([*OPTIONS, "script.py"])
    assert problems == ""
    found = re.findall(r"script.py:(\d+): error: .*\[([\w-]+)\]", printed)
    lines = enumerate(USER_SCRIPT.splitlines(), 1)
    wanted = [(str(number), line.split("# E: ")[1]) for number, line in lines if "# E: " in line]
    assert list(dict.fromkeys(found)) == wanted, printed  # once for each class of a union
