"""The commands of all READMEs run, and their examples hold."""

import hashlib
import itertools
import json
import os
import re
import shlex
import sys
import types
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import timm
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from torch import nn

from datamodules.sources import SOURCES
from datamodules.translation import TranslationData
from modules.attention import ATTENTIONS
from modules.models.bert import BertClassifier, BertMaskedLM
from modules.models.gpt import Decoder
from modules.models.images import build_image_net
from modules.models.mae import MaskedAutoencoder
from modules.models.seq2seq import Seq2Seq
from modules.norm import NORMS
from modules.position import POSITIONS
from modules.pretrained import bert, decoder, mae, seq2seq
from tasks.bert.task import BertTask
from tasks.cli.app import load
from tasks.cli.main import main
from tasks.lab.__main__ import main as run_lab
from tasks.lm.task import LMTask
from tasks.mlm.task import MaskedLMTask
from tasks.problems import PROBLEMS
from tasks.seq2seq.task import Seq2SeqTask
from tasks.vit.export import LIBRARIES
from tasks.vit.task import ViTTask
from tests.helpers.tiny import write_pairs, write_reviews

ROOT = Path(__file__).parents[1]
READMES = [
    ROOT / name / "README.md"
    for name in ("", "tasks", "datamodules", "modules", "configs", "tests/benchmarks")
]
SHORT = (
    "--trainer.limit_train_batches 2 --data.batch_size 2 --trainer.limit_val_batches 1"
    " --trainer.limit_test_batches 1"
)
WRITTEN = [
    "runs/lab/short/report.md",
    "runs/first/checkpoints/best.onnx",
    "my_bert/model.safetensors",
    "my_graph/model.onnx",
    "my_gpt/model.safetensors",
    "attention.png",
    "translated.txt",
    "runs/captions/checkpoints/last.safetensors",
]


def blocks(language: str) -> list[str]:
    """The code blocks in one language."""
    texts = [path.read_text() for path in READMES]
    return [
        block for text in texts for block in re.findall(rf"```{language}\n(.*?)```", text, re.S)
    ]


def example_name(code: str) -> str:
    """The first class of an example, or else its last line."""
    return (re.findall(r"class (\w+)", code) or [code.splitlines()[-1]])[0]


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"), ids=example_name)
def test_examples(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if 'load("runs/lm/latest")' in code:  # the runs before the page's first example
        picture(8).convert("L").save(tmp_path / "photo.png")
        for task in ("vit", "lm"):
            app = import_module(f"tasks.{task}.__main__").APP
            assert main(app, f"fit --trainer.max_epochs 1 {SHORT}".split()) == 0
    if "import ray\n" in code:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of Ray's workers
        import ray

        request.addfinalizer(ray.shutdown)
    registries = {"SOURCES": SOURCES, "POSITIONS": POSITIONS, "ATTENTIONS": ATTENTIONS}
    for registry, name in re.findall(r'^(\w+)\["(\w+)"\] = ', code, re.M):
        monkeypatch.setitem(registries[registry], name, None)  # removes the example's entry later
    module = types.ModuleType("readme_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "README.md", "exec", dont_inherit=True), vars(module))
    for summary in tmp_path.glob("runs/linear/latest/summary.json"):
        assert json.loads(summary.read_text())["test/acc"] > 0.9


def test_linked_files_exist() -> None:
    for readme in READMES:
        for path in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", readme.read_text()):
            assert (readme.parent / path).exists(), (readme, path)


def test_named_tests_and_options_exist() -> None:
    text = (ROOT / "modules/README.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", text)
    assert len(names) > 15
    for name in names:
        assert f"def {name}(" in tests, name
    for name, file in re.findall(r"\[`[\w.]*?(\w+)`\]\(([\w./]+\.py)\)", text):
        code = (ROOT / "modules" / file).read_text()
        assert re.search(rf"(class|def) {name}\b|^{name}\b", code, re.M) or name in file, name


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def metric_names(task: Any, **metadata: Any) -> list[str]:
    """The metrics of an evaluation of data with this metadata."""
    task.metadata = metadata
    found: list[str] = []
    for name, metric in task.make_metrics().items():
        found += getattr(metric, "names", (name,))
    values = {f"val/{name}": torch.ones(()) for name in [*found, "loss"]}
    return found + [name.removeprefix("val/") for name in task.derived(values, "val")]


def test_all_metrics_are_explained() -> None:
    text = (ROOT / "tasks/README.md").read_text().partition("### Metrics")[2].partition("###")[0]
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", text, re.M))))
    targets = {"class_names": ["a", "b"], "num_classes": 2, "target_mean": 0, "target_std": 1}
    names: list[str] = []
    for problem in PROBLEMS:
        for kind in (ViTTask, BertTask):
            names += metric_names(kind(problem_type=problem), problem_type=problem, **targets)
    names += metric_names(LMTask())
    names += metric_names(MaskedLMTask(), next_sentence=True)
    data = TranslationData()  # the embedded dates
    data.setup("fit")
    names += metric_names(Seq2SeqTask(), **data.metadata())
    assert set(names) - explained == set()


def test_the_first_picture_and_its_figures_are_of_one_run() -> None:
    """`digits.json` is the `summary.json` of the run whose `confusion.png` is `digits.png`."""
    run = json.loads((ROOT / ".images/digits.json").read_text())
    assert run["command"] == "python -m tasks.vit fit"
    picture = hashlib.sha256((ROOT / ".images/digits.png").read_bytes()).hexdigest()
    assert run["sha256 of confusion.png"] == picture
    accuracy, seconds = f"{run['test/acc']:.3f}", f"{run['seconds']:.0f} s in all"
    text = (ROOT / "README.md").read_text()
    assert f"{accuracy} of the test digits are right, after {seconds}" in text
    text = (ROOT / "tests/benchmarks/README.md").read_text()
    assert f"{accuracy} on {run['test_samples']} held-out images, {seconds}" in text


SIZES: dict[str, dict[str, Any]] = {  # of data, which presets leave open
    "vit": {"channels": 3, "num_classes": 2},
    "mae": {"channels": 3},
    "bert": {"vocabulary": 9, "num_classes": 2},
    "mlm": {"vocabulary": 9},
    "lm": {"vocabulary": 9, "max_length": 8},
    "igpt": {"vocabulary": 9, "output_vocabulary": 8, "max_length": 16},
    "seq2seq": {"source_vocabulary": 9, "target_vocabulary": 9, "max_length": 8},
}


def exports(task: str, format: str, config: Any) -> bool:
    """Whether a network can be written for timm or Hugging Face."""
    build, families = {
        "vit": (build_image_net, {}),
        "mae": (MaskedAutoencoder, mae.FAMILIES),
        "bert": (BertClassifier, bert.FAMILIES),
        "mlm": (BertMaskedLM, bert.FAMILIES),
        "lm": (Decoder, decoder.FAMILIES),
        "igpt": (Decoder, decoder.IMAGE_FAMILIES),
        "seq2seq": (Seq2Seq, seq2seq.FAMILIES),
    }[task]
    metadata = {"class_names": [], "problem_type": "", "mean": [], "std": []}
    with torch.device("meta"):
        net: Any = build(config)
    if task == "vit":
        with suppress(ValueError):
            LIBRARIES[format](net, metadata)
            return True
    for family in families.values():
        with suppress(ValueError):
            family.weights_to_external(net.state_dict(), config)
            if task == "mae":
                family.config_to_external(config)
            elif task in ("bert", "mlm"):
                family.config_to_external(config, None)
            else:
                family.config_to_external(config, {})
            return True
    return False


@pytest.mark.parametrize("task", SIZES)
def test_presets_that_can_be_exported(task: str) -> None:
    text = (ROOT / "tasks/README.md").read_text()
    rows = dict(re.findall(rf"^\| `(\w+)` \| `{task}` \| (.*) \|$", text, re.M))
    assert list(rows) == (["timm", "hf"] if task == "vit" else ["hf"])
    presets = load(import_module(f"tasks.{task}.__main__").APP.presets)
    filled = {name: replace(config, **SIZES[task]) for name, config in presets.items()}
    for format, cells in rows.items():
        found = [name for name, config in filled.items() if exports(task, format, config)]
        assert re.findall(r"`(\w+)`", cells) == found
    export = load(import_module(f"tasks.{task}.__main__").APP.extra_commands["export"][1])
    formats = re.findall(r"'(\w+)'", str(get_type_hints(export)["format"]))
    assert set(formats) == {"safetensors", "onnx", *rows}


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the README's commands use, and timm without its downloads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    write_parquet(tmp_path / "cifar10_jpeg", "label", 10)
    write_parquet(tmp_path / "cifar100", "fine_label", 100)
    for split, animal in itertools.product(("train", "val"), ("cat", "dog")):
        folder = tmp_path / "my_images" / split / animal
        folder.mkdir(parents=True)
        for number in range(4):
            picture(20 + number).save(folder / f"{number}.jpg")
    picture(8).convert("L").save(tmp_path / "photo.png")
    for number in range(20):
        picture(20 + number).save(tmp_path / f"photo{number}.png")
    write_reviews(tmp_path / "imdb", words=("dull", "good"))  # each of one token, for `look`
    lines = [f"a {word} film seen {i} times" for i in range(20) for word in ("good", "bad")]
    labelled = [f"{line},{line.split()[1]}" for line in lines]
    pairs = [f"{number} apples\t{number} Äpfel" for number in range(40)]
    texts = {
        "lines.txt": lines,
        "captions.txt": lines,
        "my_texts.csv": ["review,label", *labelled],
        "my_ratings.csv": ["text,rating", *(f"film {i},{i / 4}" for i in range(40))],
        "my_photos.csv": ["file_name,labels", *(f'photo{i}.png,"cat,{i % 3}"' for i in range(20))],
        "my_pairs.tsv": ["en\tde", *pairs],
        "shakespeare.txt": ["To be, or not to be, that is the question: ROMEO"] * 200,
        "my_texts/shakespeare.txt": ["To be, or not to be, that is the question: ROMEO"] * 200,
    }
    (tmp_path / "my_texts").mkdir()
    for name, rows in texts.items():
        (tmp_path / name).write_text("\n".join([*rows, ""]))
    write_pairs(tmp_path / "my_pairs", languages=("en", "de"))
    write_pairs(tmp_path / "multi30k", test="test_2016_flickr", languages=("en", "de"))
    create = timm.create_model

    def create_untrained(name: str, pretrained: bool = False, **options: Any) -> Any:
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", create_untrained)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # more than a hundred commands
def test_commands(
    surroundings: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs = 1
    monkeypatch.setitem(NORMS, "my_norm", nn.LayerNorm)
    for line in "".join(blocks("bash")).splitlines():
        line = line.removeprefix("TESSERA_TRUST=my_blocks ")
        command, arguments = shlex.split(line)[:3], shlex.split(line)[3:]
        assert re.fullmatch(r"python -m tasks\.\w+", " ".join(command)), line
        if arguments[0] == "fit" and "--help" not in arguments:
            epochs += "--resume" in arguments
            arguments += f"--trainer.max_epochs {epochs} {SHORT}".split()
        if command[2] == "tasks.lab":
            shorter = ["--steps", "1", "--seeds", "0"] if arguments[0] == "run" else []
            assert run_lab([*arguments, *shorter]) == 0, capsys.readouterr().err
            continue
        try:
            code = main(import_module(f"{command[2]}.__main__").APP, arguments)
        except SystemExit as stop:  # of --help
            code = stop.code or 0
        assert code == 0, f"{line}\n{capsys.readouterr().err}"
    assert Path("labelled.csv").read_text().count("\n") == 17
    assert Path("sorted.csv").read_text().count("\n") == 41
    assert [name for name in WRITTEN if not Path(name).exists()] == []


def picture(side: int) -> Image.Image:
    """A random colour picture."""
    return Image.fromarray(torch.randint(0, 256, (side, side, 3), dtype=torch.uint8).numpy())


def write_parquet(folder: Path, column: str, classes: int) -> None:
    """A data set of the hub's schema with one small picture per class and split."""
    folder.mkdir()
    names = [f"class {i}" for i in range(classes)]
    features = Features({"img": ImageFeature(), column: ClassLabel(names=names)})
    for split, copies in (("train", 4), ("test", 1)):
        labels = list(range(classes)) * copies
        rows = {"img": [picture(32) for _ in labels], column: labels}
        table = Dataset.from_dict(rows, features=features)
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
