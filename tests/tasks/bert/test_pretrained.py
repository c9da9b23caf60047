"""Encoders trained from pretrained weights, ours and Hugging Face's, and exported again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tessera
import torch
import transformers
import yaml

from datamodules.embedded.reviews import generate
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.cache import content_key
from modules.pretrained.bert import FAMILIES
from tasks.errors import UsageError
from tests.helpers.command import Console, Patch, run
from tests.helpers.marks import slow_except
from tests.helpers.model_folders import encoder_folder
from tests.helpers.results import checkpoint
from tests.helpers.tiny import NET, NO_UPDATES, write_reviews

DATA = "--data.source hub --data.max_length 16 --data.batch_size 4 --data.path"
FIT = (
    "fit --trainer.limit_train_batches 3 --trainer.limit_val_batches 2 --trainer.max_epochs 1 "
    f"--trainer.limit_test_batches 1 --trainer.log_every_n_steps 1 {DATA}"
)
FROZEN = f"{NO_UPDATES} --model.optimizer.freeze 3"


@pytest.fixture(scope="module")
def pretraining(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of masked-LM pretraining on tiny reviews, without dropout; not to be changed."""
    folder = tmp_path_factory.mktemp("pretraining")
    write_reviews(folder / "hub")
    line = f"{FIT} {folder}/hub {NET} --data.tokenizer.vocabulary 300 --run_dir {folder}/m"
    assert run(line, "mlm") == 0
    return folder


@pytest.fixture
def pretrained(pretraining: Path) -> str:
    """Its checkpoint; the data and the run lie in the working folder as `hub` and `m`."""
    for name in ("hub", "m"):
        shutil.copytree(pretraining / name, name)
    return "m/checkpoints/best.ckpt"


def test_tokenizer_and_sizes_come_from_pretraining_and_dropout_from_the_run(
    pretrained: str,
) -> None:
    line = f"{FIT} hub --preset tiny --model.pretrained {pretrained} --model.optimizer.freeze 3"
    assert run(f"{line} --run_dir b", "bert") == 0
    theirs = checkpoint("m", "best")
    ours = checkpoint("b")
    assert ours["tessera"]["metadata"]["tokenizer"] == theirs["tessera"]["metadata"]["tokenizer"]
    frozen = ("net.encoder.embed", "net.encoder.stack.blocks")
    names = [name for name in ours["state_dict"] if name.startswith(frozen)]
    assert len(names) > 10
    for name in names:
        assert torch.equal(ours["state_dict"][name], theirs["state_dict"][name])
    for saved, rate in ((theirs, 0), (ours, 0.1)):
        net = saved["tessera"]["net"]
        assert net["stack"]["width"] == 32  # the preset has 128
        rates = (net["stack"]["dropout"], net["stack"]["attention_dropout"], net["head_dropout"])
        assert rates == (rate, rate, rate)


def test_null_after_weights_keeps_network_and_tokenizer_of_theirs(pretrained: str) -> None:
    line = f"{FIT} hub --model.pretrained {pretrained} {NO_UPDATES}"
    assert run(f"{line} --run_dir b", "bert") == 0
    assert run(f"{line} --model.pretrained null --run_dir c", "bert") == 0
    trained = checkpoint("b")
    new = checkpoint("c")
    assert new["tessera"]["net"] == trained["tessera"]["net"]
    assert new["tessera"]["metadata"] == trained["tessera"]["metadata"]
    table = "net.encoder.embed.weight"
    assert not torch.allclose(new["state_dict"][table], trained["state_dict"][table], atol=1e-3)


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("task", ["bert", "mlm"])
def test_another_tokenizer_is_refused_with_both_sizes(
    task: str, pretrained: str, console: Console
) -> None:
    size = checkpoint("m", "best")["tessera"]["metadata"]["vocabulary"]
    encoder_folder(Path("theirs"), "BertForMaskedLM")
    other = Tokenizer.train(generate()["train"][0], TokenizerConfig("word", 150))
    Path("other.json").write_text(other.to_json())
    for source, tokens in ((pretrained, size), ("theirs", 300)):
        line = f"{FIT} hub --model.pretrained {source} --data.tokenizer.file"
        console.refused(f"{line} other.json", "150 tokens", str(tokens), task=task)
    content = json.loads(Path("theirs/tokenizer.json").read_text())
    Path("same.json").write_text(json.dumps(content, indent=2))
    assert run(f"{line} same.json --run_dir r", task) == 0


@pytest.mark.slow
def test_options_that_would_train_a_tokenizer(pretrained: str, console: Console) -> None:
    size = checkpoint("m", "best")["tessera"]["metadata"]["vocabulary"]
    line = f"{FIT} hub --model.pretrained {pretrained}"
    for option in ("kind character", "vocabulary 50", "min_frequency 1", "lowercase false"):
        names = (f"--data.tokenizer.{option.split()[0]}", f"--model.pretrained {pretrained}")
        console.refused(f"{line} --data.tokenizer.{option}", *names, task="bert")
    tokenizer = {"kind": "character", "vocabulary": 50, "truncate": "both"}
    Path("c.yaml").write_text(json.dumps({"data": {"tokenizer": tokenizer}}))
    expected: dict[str, Any] = {"kind": "wordpiece", "vocabulary": size, "truncate": "both"}
    expected |= {"min_frequency": None, "lowercase": None}
    options = line.removeprefix("fit ")
    for number, line in enumerate((f"--config c.yaml {options}", f"{options} --config c.yaml")):
        assert run(f"fit {line} --run_dir {number}", "bert") == 0
        written = yaml.safe_load(Path(f"{number}/config.yaml").read_text())["data"]["tokenizer"]
        saved = checkpoint(str(number))["tessera"]
        assert written == saved["config"]["data"]["tokenizer"]
        assert written == saved["metadata"]["tokenizer_options"]
        assert {key: value for key, value in written.items() if key != "file"} == expected
    assert run("fit --resume 0 --trainer.max_epochs 2", "bert") == 0
    assert run("predict --ckpt_path 0/checkpoints/best.ckpt --text good", "bert") == 0
    assert run("fit --config 0/config.yaml --run_dir again", "bert") == 0


def test_a_cache_that_takes_no_tokenizer(
    pretrained: str, monkeypatch: Patch, console: Console
) -> None:
    text = Path("m/tokenizer.json").read_text(encoding="utf-8")
    Path("m/tokenizer.json").unlink()
    monkeypatch.setenv("TESSERA_CACHE", "cache")
    # No file can replace a folder.
    taken = Path("cache/tokenizers", f"{content_key(text)}.tokenizer.json", "folder")
    taken.mkdir(parents=True)
    line = f"{FIT} hub --model.pretrained {pretrained} --run_dir b"
    console.refused(line, "TESSERA_CACHE", task="bert", code=1)
    shutil.rmtree("cache")
    assert run(line, "bert") == 0


@pytest.mark.parametrize("kept", ["head", "tail", "both"])
def test_an_export_keeps_the_same_part_of_long_texts(kept: str, console: Console) -> None:
    """transformers does, too, but for "both", which it does not know."""
    write_reviews(Path("hub"))
    options = "--preset tiny --model.net.stack.width 32 --model.net.stack.heads 2"
    options += f" --data.tokenizer.vocabulary 300 --data.tokenizer.truncate {kept}"
    assert run(f"{FIT} hub {options} --run_dir r", "bert") == 0
    text = " ".join(map(str, range(40)))
    expected = tessera.load("r", kind=tessera.TextClassifier).token_ids(text)
    assert len(expected) == 16
    for format in ("hf", "onnx"):
        out, _ = console.printed(
            f"export --ckpt_path r --format {format} --output {format}", "bert"
        )
        assert ("transformers keeps the head" in out) == (kept == "both")
        tokenizer = transformers.AutoTokenizer.from_pretrained(format)
        assert (tokenizer(text, truncation=True)["input_ids"] == expected) == (kept != "both")
    found = tessera.load("hf", kind=tessera.TextClassifier)
    assert found.token_ids(text) == expected
    tokens = tokenizer("a [SEP] b [PAD]")["input_ids"]  # names of special tokens are text
    assert found.token_ids("a [SEP] b [PAD]") == tokens and tokens.count(tokens[-1]) == 1


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("family", slow_except(["bert", "distilbert"], FAMILIES))
@pytest.mark.parametrize(
    "task, head", [("bert", "ForSequenceClassification"), ("mlm", "ForMaskedLM")]
)
def test_hugging_face_and_back(task: str, head: str, family: str, console: Console) -> None:
    write_reviews(Path("hub"))
    theirs = encoder_folder(Path("theirs"), FAMILIES[family].architecture + head)
    said, _ = console.printed(f"{FIT} hub --model.pretrained theirs {FROZEN} --run_dir r", task)
    assert "/r/checkpoints/best.ckpt --format hf" in said
    line = "export --ckpt_path r/checkpoints/best.ckpt --format hf --output back"
    out, _ = console.printed(line, task)
    # What only DistilBERT has becomes DistilBERT, all else BERT.
    kind = "DistilBert" if (task, family) == ("bert", "distilbert") else "Bert"
    assert f"transformers.{kind}{head}.from_pretrained('back')" in out
    back = getattr(transformers, kind + head).from_pretrained("back").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("back")
    texts = ["not bad at all", "a dull film, but I liked it"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        found = back(**batch).logits
        expected = theirs(**batch).logits
    kept = batch["attention_mask"].bool() if task == "mlm" else torch.tensor([True, True])
    torch.testing.assert_close(found[kept], expected[kept], atol=1e-4, rtol=1e-4)
    assert expected[kept].std() > 0.01
    if task == "bert":
        assert back.config.id2label == {0: "neg", 1: "pos"}


@pytest.mark.parametrize("task", ["bert", "mlm"])
def test_few_positions_shorten_the_texts_unless_their_length_is_given(
    task: str, console: Console
) -> None:
    write_reviews(Path("hub"))
    encoder_folder(Path("theirs"), "BertForMaskedLM", max_position_embeddings=24)
    line = f"{FIT} hub --model.pretrained theirs".replace("--data.max_length 16", "")
    assert run(f"{line} --run_dir r", task) == 0
    assert checkpoint("r")["tessera"]["metadata"]["max_length"] == 24
    refused = f"{line} --data.max_length 25 --run_dir s"
    console.refused(refused, "--data.max_length 25", "24 learned positions", task=task)


def assert_rows(folder: str, weights: dict[str, torch.Tensor], rows: list[int] | None) -> None:
    """Compares a classifier with rows of another one; None: it was initialised anew."""
    state = checkpoint(folder)["state_dict"]
    for name, value in weights.items():
        found = state[f"net.head.linear.{name}"]
        if rows is None:
            assert not torch.isin(found, value).any()
        else:
            torch.testing.assert_close(found, value.detach()[rows], atol=1e-6, rtol=0)


def test_a_head_that_fits_is_kept_unless_it_is_reset() -> None:
    write_reviews(Path("hub"))
    encoder_folder(Path("theirs"), "BertForSequenceClassification")
    line = f"{FIT} hub {NO_UPDATES} --model.pretrained theirs"
    assert run(f"{line} --run_dir kept", "bert") == 0
    assert run(f"{line} --model.reset_head true --run_dir reset", "bert") == 0
    kept = checkpoint("kept")["state_dict"]
    reset = checkpoint("reset")["state_dict"]
    for name, value in kept.items():
        if name.startswith("net.encoder."):
            torch.testing.assert_close(reset[name], value, atol=1e-6, rtol=0)
    for name in ("net.head.linear.weight", "net.pooler.dense.weight"):
        assert (reset[name] - kept[name]).abs().mean() > 0.01, name


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("names, settings, rows", [
    (("neg", "pos"), {}, [0, 1]),
    (("pos", "neg"), {}, [1, 0]),
    (("LABEL_0", "LABEL_1"), {}, None),
    pytest.param(("NEGATIVE", "POSITIVE"), {}, None, marks=pytest.mark.slow),
    pytest.param(("neg", "neutral", "pos"), {}, None, marks=pytest.mark.slow),
    pytest.param(("neg", "neg"), {}, None, marks=pytest.mark.slow),
    pytest.param(("neg", "pos"), {"id2label": None}, None, marks=pytest.mark.slow),
    (("neg", "pos"), {"id2label": {"a": "neg", "b": "pos"}}, None),
])  # fmt: skip
def test_rows_of_a_classifier_are_ordered_by_the_names_of_classes(
    names: tuple[str, ...], settings: dict[str, Any], rows: list[int] | None, console: Console
) -> None:
    write_reviews(Path("hub"))
    theirs = encoder_folder(Path("theirs"), "BertForSequenceClassification", names)
    file = Path("theirs/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    said, _ = console.printed(f"{FIT} hub {FROZEN} --model.pretrained theirs --run_dir r", "bert")
    assert ("anew" in said) == (rows is None)
    if rows is None and not settings:
        assert ", ".join(names) in said
    assert_rows("r", dict(theirs.classifier.named_parameters()), rows)


def test_a_classifier_of_other_classes_than_its_config_names() -> None:
    encoder_folder(Path("theirs"), "BertForSequenceClassification", ("neg", "pos"))
    file = Path("theirs/config.json")
    settings = json.loads(file.read_text()) | {"id2label": {"0": "a", "1": "b", "2": "c"}}
    file.write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="has 3 classes, but the classifier .* another number"):
        tessera.load("theirs")


def test_a_checkpoint_of_a_classifier_takes_the_classes_of_the_data(
    pretrained: str, console: Console
) -> None:
    write_reviews(Path("a"), names=("ham", "spam"))
    write_reviews(Path("b"), names=("spam", "ham"))
    write_reviews(Path("c"), names=("eggs", "spam"))
    assert run(f"{FIT} a --model.pretrained {pretrained} --run_dir first", "bert") == 0
    state = checkpoint("first", "best")["state_dict"]
    weights = {name: state[f"net.head.linear.{name}"] for name in ("weight", "bias")}
    for folder, rows in {"a": [0, 1], "b": [1, 0], "c": None}.items():
        line = f"{FIT} {folder} {FROZEN} --model.pretrained first/checkpoints/best.ckpt"
        out, _ = console.printed(f"{line} --run_dir {folder}2", "bert")
        assert ("anew" in out) == (rows is None)
        assert_rows(f"{folder}2", weights, rows)
