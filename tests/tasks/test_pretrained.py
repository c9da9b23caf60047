"""Encoders that go on from pretrained weights, ours and Hugging Face's: what comes with them, and what does not."""

import json
import shutil
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning.utilities import rank_zero_only

from datamodules.embedded.reviews import generate
from datamodules.tokenizers import SPECIAL_TOKENS, Tokenizer, TokenizerConfig
from datamodules.utils.cache import content_key
from modules.models.bert import BertClassifier, BertConfig
from modules.pretrained.bert import FAMILIES
from tasks.bert.architectures import load_pretrained
from tasks.checkpoints.reading import load_config
from tests.modules.test_parity_bert import SIZES
from tests.tasks.command import checkpoint, metrics, run, write_reviews
from tests.tasks.test_bert import BERT, BRIEF, FEW, SMALL

transformers = pytest.importorskip("transformers")

HUB = "--data.source hub --data.path hub --data.max_length 16 --data.batch_size 4"
STILL = "--model.optimizer.freeze 3 --model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"


@pytest.fixture
def pretrained() -> str:
    """A checkpoint of masked-LM pretraining on tiny reviews in the folder `hub`."""
    write_reviews(Path("hub"))
    assert run(f"fit {SMALL} {FEW} {HUB} --run_dir m", "mlm") == 0
    return "m/checkpoints/best.ckpt"


def save_tokenizer(folder: Path, family: str) -> Tokenizer:
    """A trained tokenizer in the files that a family of Hugging Face's has."""
    texts = generate()["train"][0][:500]
    if family != "roberta":
        tokenizer = Tokenizer.train(texts, TokenizerConfig(vocabulary=300))
        (folder / "tokenizer.json").write_text(tokenizer.to_json())
        return tokenizer
    learned = Tokenizer.train(texts, TokenizerConfig("bpe", 300))
    names = dict(
        zip(
            SPECIAL_TOKENS.values(),
            ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<a>", "<b>"),
            strict=True,
        )
    )
    model = json.loads(learned.to_json())["model"]
    numbers = {names.get(token, token): number for token, number in model["vocab"].items()}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    (folder / "merges.txt").write_text(
        "#version\n" + "\n".join(" ".join(pair) for pair in model["merges"])
    )
    return learned


def hugging_face(
    folder: Path, head: str, family: str = "bert", names: tuple[str, ...] = ("neg", "pos")
) -> Any:
    """A random model of Hugging Face's with a trained tokenizer, saved in `folder`; a classifier has these classes."""
    folder.mkdir(exist_ok=True)
    tokenizer, kind = save_tokenizer(folder, family), FAMILIES[family].architecture
    torch.manual_seed(0)
    sizes = SIZES[family] | {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64}
    sizes["id2label"] = dict(enumerate(names))
    model = getattr(transformers, kind + head)(
        getattr(transformers, f"{kind}Config")(**sizes)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn_like(parameter) * 0.1
            )  # far from symmetric, so that mistakes show
    model.save_pretrained(folder)
    return model


def refused(line: str, task: str, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command that fails with this code says."""
    capsys.readouterr()
    assert run(line, task) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_pretraining_carries_over_with_its_tokenizer(pretrained: str) -> None:
    source = checkpoint("m", "best")
    perplexity = [row for row in metrics("m") if "val/perplexity" in row]
    assert (
        all(
            float(row["val/perplexity"])
            == pytest.approx(torch.tensor(float(row["val/loss"])).exp().item(), rel=1e-4)
            for row in perplexity
        )
        and len(perplexity) == 2
    )
    line = f"fit {FEW} {HUB} --model.pretrained {pretrained} --model.optimizer.freeze 3 --run_dir b"
    assert run(line, "bert") == 0
    ours = checkpoint("b")
    assert ours["tessera"]["metadata"]["tokenizer"] == source["tessera"]["metadata"]["tokenizer"]
    frozen = [
        name
        for name in ours["state_dict"]
        if name.startswith(("net.encoder.embed", "net.encoder.stack.blocks"))
    ]
    assert frozen and all(
        torch.equal(ours["state_dict"][name], source["state_dict"][name]) for name in frozen
    )


def test_rates_of_dropout_are_those_of_the_run_and_not_of_pretraining(pretrained: str) -> None:
    assert (
        run(f"fit {FEW} {HUB} --preset tiny --model.pretrained {pretrained} --run_dir b", "bert")
        == 0
    )
    ours, theirs = (checkpoint(name)["tessera"]["net"] for name in ("b", "m"))
    assert ours["stack"]["width"] == theirs["stack"]["width"] == 32  # where the preset has 128
    assert (
        theirs["stack"]["dropout"]
        == theirs["stack"]["attention_dropout"]
        == theirs["head_dropout"]
        == 0
    )
    assert (
        ours["stack"]["dropout"]
        == ours["stack"]["attention_dropout"]
        == ours["head_dropout"]
        == 0.1
    )


def test_only_the_first_process_says_what_starts_anew(
    pretrained: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = checkpoint("m", "best")["tessera"]
    net = BertClassifier(replace(load_config(BertConfig, saved["net"]), num_classes=2))
    for rank in (0, 1):
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        capsys.readouterr()
        load_pretrained(lambda: net, pretrained, saved["metadata"])
        assert ("anew" in capsys.readouterr().out) == (rank == 0)


def test_another_tokenizer_is_refused_with_both_sizes(
    pretrained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{BERT} {BRIEF} --run_dir r --data.tokenizer.kind word", "bert") == 0
    theirs, own = (checkpoint(name)["tessera"]["metadata"]["vocabulary"] for name in ("m", "r"))
    line = f"fit {FEW} {HUB} --model.pretrained {pretrained} --data.tokenizer.file r/tokenizer.json"
    said = refused(line, "bert", 2, capsys)
    assert str(theirs) in said and str(own) in said


def test_weights_come_with_their_tokenizer_whatever_would_train_one(
    pretrained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = checkpoint("m", "best")["tessera"]["metadata"]["vocabulary"]
    line = f"fit {FEW} {HUB} --model.pretrained {pretrained}"
    for option in ("kind character", "vocabulary 50", "min_frequency 1", "lowercase false"):
        said = refused(f"{line} --data.tokenizer.{option}", "bert", 2, capsys)
        asked = "50" if option == "vocabulary 50" else "16000"
        assert (
            f"{option.split()[0]} " in said
            and f"(vocabulary {asked})" in said
            and f"({size} tokens)" in said
        )
    config = {"data": {"tokenizer": {"kind": "character", "vocabulary": 50, "truncate": "both"}}}
    Path("c.yaml").write_text(json.dumps(config))
    saved = {
        "kind": "wordpiece",
        "vocabulary": size,
        "min_frequency": None,
        "lowercase": None,
        "truncate": "both",
    }
    for name, order in {
        "0": f"--config c.yaml {line[4:]}",
        "1": f"{line[4:]} --config c.yaml",
    }.items():
        assert run(f"fit {order} --run_dir {name}", "bert") == 0
        written = yaml.safe_load(Path(f"{name}/config.yaml").read_text())["data"]["tokenizer"]
        kept = checkpoint(name)["tessera"]
        assert (
            written == kept["config"]["data"]["tokenizer"] == kept["metadata"]["tokenizer_options"]
        )
        assert {key: value for key, value in written.items() if key != "file"} == saved
    assert run("fit --resume 0 --trainer.max_epochs 3", "bert") == 0
    assert run("predict --ckpt_path 0/checkpoints/best.ckpt --text good", "bert") == 0
    assert run("fit --config 0/config.yaml --run_dir again", "bert") == 0


@pytest.mark.parametrize("task", ("bert", "mlm"))
def test_another_tokenizer_than_that_of_the_folder_is_refused(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reviews(Path("hub"))
    hugging_face(Path("theirs"), "ForMaskedLM")
    content = json.loads(Path("theirs/tokenizer.json").read_text())
    Path("same.json").write_text(json.dumps(content, indent=2))
    other = Tokenizer.train(generate()["train"][0], TokenizerConfig("word", 150))
    Path("other.json").write_text(other.to_json())
    line = f"fit {FEW} {HUB} --model.pretrained theirs"
    said = refused(f"{line} --data.tokenizer.file other.json", task, 2, capsys)
    assert "(150 tokens) is not that of theirs (300 tokens)" in said
    assert run(f"{line} --data.tokenizer.file same.json --run_dir r", task) == 0


def test_a_cache_that_takes_no_tokenizer(
    pretrained: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("m/tokenizer.json").read_text(encoding="utf-8")
    Path("m/tokenizer.json").unlink()
    monkeypatch.setenv("TESSERA_CACHE", "cache")
    taken = Path(
        "cache/tokenizers", f"{content_key(text)}.tokenizer.json", "folder"
    )  # no file can replace a folder
    taken.mkdir(parents=True)
    line = f"fit {FEW} {HUB} --model.pretrained {pretrained} --run_dir b"
    assert "set TESSERA_CACHE to a folder with space" in refused(line, "bert", 1, capsys)
    shutil.rmtree("cache")
    assert run(line, "bert") == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("task", "head"), [("bert", "ForSequenceClassification"), ("mlm", "ForMaskedLM")]
)
def test_hugging_face_and_back(
    task: str, head: str, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reviews(Path("hub"))
    theirs = hugging_face(Path("theirs").resolve(), head, family)
    data = "--data.source hub --data.path hub --data.max_length 32 --data.batch_size 8"
    assert run(f"fit {FEW} {data} --model.pretrained theirs {STILL} --run_dir r", task) == 0
    capsys.readouterr()
    assert run("export --ckpt_path r/checkpoints/best.ckpt --format hf --output back", task) == 0
    kind = (
        "DistilBert" if (task, family) == ("bert", "distilbert") else "Bert"
    )  # what only that has, and the others
    assert f"transformers.{kind}{head}.from_pretrained('back')" in capsys.readouterr().out
    back = getattr(transformers, kind + head).from_pretrained("back").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("back")
    batch = tokenizer(
        ["not bad at all", "a dull film, but I liked it"], return_tensors="pt", padding=True
    )
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        found, expected = back(**batch).logits, theirs(**batch).logits
    places = batch["attention_mask"].bool() if task == "mlm" else torch.tensor([True, True])
    torch.testing.assert_close(found[places], expected[places], atol=1e-4, rtol=0)
    assert expected[places].std() > 0.01
    if task == "bert":
        assert back.config.id2label == {0: "neg", 1: "pos"}


def test_a_head_that_fits_is_kept_unless_it_is_reset() -> None:
    theirs = hugging_face(
        Path("theirs"), "ForSequenceClassification", names=("negative", "positive")
    )
    line = f"fit {FEW} {BRIEF} {STILL} --data.max_length 32 --data.batch_size 8 --model.pretrained theirs"
    assert run(f"{line} --run_dir kept", "bert") == 0
    assert run(f"{line} --model.reset_head true --run_dir reset", "bert") == 0
    kept, reset = checkpoint("kept")["state_dict"], checkpoint("reset")["state_dict"]
    torch.testing.assert_close(
        kept["net.head.linear.weight"], theirs.classifier.weight.detach(), atol=1e-6, rtol=0
    )
    for name, value in kept.items():
        if name.startswith("net.encoder."):
            torch.testing.assert_close(reset[name], value, atol=1e-6, rtol=0)
    for name in ("net.head.linear.weight", "net.pooler.dense.weight"):
        assert (reset[name] - kept[name]).abs().mean() > 0.01, name


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (("neg", "pos"), [0, 1]),
        (("pos", "neg"), [1, 0]),
        (("LABEL_0", "LABEL_1"), None),
        (("NEGATIVE", "POSITIVE"), None),
        (("neg", "neutral", "pos"), None),
        (("neg", "neg"), None),
    ],
)
def test_rows_of_a_classifier_go_by_the_names_of_the_classes(
    names: tuple[str, ...], rows: list[int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reviews(Path("hub"))
    theirs = hugging_face(Path("theirs"), "ForSequenceClassification", names=names)
    assert run(f"fit {FEW} {HUB} {STILL} --model.pretrained theirs --run_dir r", "bert") == 0
    state, said = checkpoint("r")["state_dict"], capsys.readouterr().out
    assert ("anew" in said) == (rows is None) and (", ".join(names) in said) == (rows is None)
    for name, value in (("weight", theirs.classifier.weight), ("bias", theirs.classifier.bias)):
        found = state[f"net.head.linear.{name}"]
        if rows is not None:
            torch.testing.assert_close(found, value.detach()[rows], atol=1e-6, rtol=0)
        else:
            assert not torch.isin(found, value).any()


@pytest.mark.parametrize(
    "settings", [{"id2label": None}, {"id2label": {}}, {"id2label": {"a": "neg", "b": "pos"}}]
)
def test_a_classifier_without_names_starts_anew(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write_reviews(Path("hub"))
    hugging_face(Path("theirs"), "ForSequenceClassification")
    file = Path("theirs/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    assert run(f"fit {FEW} {HUB} {STILL} --model.pretrained theirs --run_dir r", "bert") == 0
    assert "anew" in capsys.readouterr().out


def test_a_checkpoint_of_a_classifier_goes_on_with_the_classes_of_the_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder, names in {
        "a": ("ham", "spam"),
        "b": ("spam", "ham"),
        "c": ("eggs", "spam"),
    }.items():
        write_reviews(Path(folder), names=names)
    data = "--data.source hub --data.max_length 16 --data.batch_size 4"
    assert run(f"fit {SMALL} {FEW} {data} --data.path a --run_dir first", "bert") == 0
    first = checkpoint("first", "best")["state_dict"]
    capsys.readouterr()
    for folder, rows in {"a": [0, 1], "b": [1, 0], "c": None}.items():
        line = f"fit {FEW} {data} --data.path {folder} {STILL} --model.pretrained first/checkpoints/best.ckpt"
        assert run(f"{line} --run_dir {folder}2", "bert") == 0
        assert ("anew" in capsys.readouterr().out) == (rows is None)
        found, had = (
            state["net.head.linear.weight"]
            for state in (checkpoint(f"{folder}2")["state_dict"], first)
        )
        if rows is not None:
            torch.testing.assert_close(found, had[rows], atol=1e-6, rtol=0)
        else:
            assert not torch.isin(found, had).any()


def test_a_model_of_the_hub_comes_with_an_older_tokenizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reviews(Path("hub"))
    hugging_face(Path("model"), "ForMaskedLM")
    numbers = json.loads(Path("model/tokenizer.json").read_text())["model"]["vocab"]
    Path("model/tokenizer.json").unlink()
    Path("model/vocab.txt").write_text("\n".join(sorted(numbers, key=numbers.__getitem__)) + "\n")

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        assert name == "someone/model"
        Path("local").mkdir(exist_ok=True)
        for file in Path("model").iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, "local")
        return "local"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    line = f"fit {FEW} {HUB} --model.pretrained hf/someone/model"
    assert run(f"{line} --run_dir r", "mlm") == 0
    assert checkpoint("r")["tessera"]["metadata"]["vocabulary"] == 300
    shutil.rmtree("local")
    Path("model/model.safetensors").unlink()
    said = refused(line, "mlm", 2, capsys)
    assert (
        "hf/someone/model has neither model.safetensors nor pytorch_model.bin" in said
        and "timm" not in said
    )


def test_older_files_of_tokenizers_are_downloaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda _, allow_patterns: asked.extend(allow_patterns)
    )
    run("fit --model.pretrained hf/someone/model", "mlm")
    assert {"vocab.txt", "vocab.json", "merges.txt"} <= set(asked)
