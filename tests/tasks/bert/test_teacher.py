"""Students of text teachers on the command line, and teachers that do not fit."""

import signal
from pathlib import Path

import pytest
import torch
import transformers

from datamodules.tokenizers import Tokenizer
from tasks.bert.teacher import load_teacher
from tasks.errors import UsageError
from tests.helpers.cases import TWO, assert_same, signal_at
from tests.helpers.command import Console, run
from tests.helpers.forked import Server
from tests.helpers.results import checkpoint, logged
from tests.helpers.tiny import FEW_STEPS, NET, Malicious
from tests.helpers.tiny_models import close, random_tokens

SMALL = f"{NET} --data.tokenizer.vocabulary 300"
FIT = f"fit {FEW_STEPS} --data.source reviews --data.batch_size 8"
STUDENT = f"{FIT} {SMALL} --model.net.stack.depth 1 --model.teacher.path teacher --run_dir r"


def test_a_student_learns_without_its_teacher_in_the_checkpoint(console: Console) -> None:
    assert run(f"{FIT} {SMALL} --run_dir teacher", "bert") == 0
    options = "--model.teacher.temperature 2 --model.teacher.cosine 0.5"
    assert run(f"{STUDENT} {options} --model.r_drop 1", "bert") == 0
    assert len(logged("r", "train/loss")) == 3
    assert len(checkpoint("r")["state_dict"]) < len(checkpoint("teacher")["state_dict"])
    line = f"{STUDENT} --data.tokenizer.vocabulary 310".replace("--run_dir r", "--run_dir other")
    console.refused(line, "tokenizer", "(300 tokens)", "(310)", task="bert")
    best = Path("teacher/checkpoints/best.ckpt")
    saved = torch.load(best, weights_only=True)
    entry = saved["tessera"]
    data = entry["metadata"]
    for metadata, width, named in (
        (data, 16, r"teacher\.cosine.*16.*32"),
        ({**data, "class_names": ["bad", "good"]}, None, "of the teacher and 'bad' of the data"),
        ({**data, "class_names": [*"abc"]}, None, "2 classes and the data have 3"),
    ):
        with pytest.raises(UsageError, match=named):
            load_teacher("teacher", metadata, width)
    torch.save({**saved, "tessera": {**entry, "task": "vit"}}, best)
    with pytest.raises(UsageError, match=r"--model\.teacher\.path.*'vit'"):
        load_teacher("teacher", data, None)
    torch.save({**saved, "extra": Malicious()}, best)
    with pytest.raises(UsageError, match="code"):
        load_teacher("teacher", data, None)
    assert not Path("pwned").exists()


def test_kept_outputs_teach_as_those_of_each_step(console: Console) -> None:
    assert run(f"{FIT} {SMALL} --run_dir teacher", "bert") == 0
    line = f"{STUDENT} --model.teacher.alpha 1 --model.teacher.keep_outputs "
    for keep in ("false", "true"):
        assert run(f"{line} {keep} --run_dir {keep}", "bert") == 0
    assert logged("true") == pytest.approx(logged("false"), rel=1e-4)
    more = "true --model.teacher.cosine 1 --run_dir other"
    console.refused(f"{line} {more}", "teacher.keep_outputs", "teacher.cosine", task="bert")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", ["cosine 0.5", "keep_outputs true"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_student_resumes_exactly(
    ranks: int, options: str, server: Server, tmp_path: Path
) -> None:
    two = TWO if ranks == 2 else ""
    line = (
        f"{STUDENT} --model.teacher.{options} --model.net.stack.dropout 0.1 {two} "
        "--trainer.precision bf16-mixed --trainer.max_epochs 2 --trainer.limit_train_batches 8 "
        "--checkpoint.every_n_train_steps 2"
    )
    folders = {name: tmp_path / name for name in ("here", "there")}
    for folder in folders.values():
        folder.mkdir()
        server.run(f"{FIT} {SMALL} --run_dir teacher", folder, "bert")
    server.run(line, folders["there"], "bert", ranks=ranks)
    running = server.start(line, folders["here"], "bert", signal_at("step"), ranks)
    (code,) = running.wait(slice(0, 1))
    running.kill(ranks=slice(1, None))
    assert code == -signal.SIGKILL
    server.run("fit --resume r", folders["here"], "bert", ranks=ranks)
    assert_same(folders["here"] / "r", folders["there"] / "r")


@pytest.mark.slow
@pytest.mark.parametrize("options", ["cosine 0.5", "keep_outputs true"])
def test_two_processes_learn_what_one_does(options: str, server: Server, tmp_path: Path) -> None:
    server.run(f"{FIT} {SMALL} --run_dir teacher", tmp_path, "bert")
    line = f"{STUDENT} --model.teacher.{options} --trainer.limit_test_batches 0"
    server.run(f"{line} --run_dir one", tmp_path, "bert")
    server.run(f"{line} {TWO} --data.batch_size 4 --run_dir two", tmp_path, "bert", ranks=2)
    one, two = (checkpoint(tmp_path / name)["state_dict"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        close(two[name], value, atol=2e-3)


@pytest.fixture
def folder() -> dict[str, object]:
    """Saves DistilBERT with a tokenizer in "it"; returns metadata of data that fit."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 97 + 26))]
    Path("vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast("vocab.txt").save_pretrained("it")
    config = transformers.DistilBertConfig(
        vocab_size=len(words), dim=32, n_layers=1, n_heads=2, hidden_dim=48,
        max_position_embeddings=20, id2label={0: "neg", 1: "pos"},
    )  # fmt: skip
    transformers.DistilBertForSequenceClassification(config).save_pretrained("it")
    return {
        "class_names": ["pos", "neg"],
        "tokenizer": Tokenizer.from_file(Path("it")).to_json(),
        "max_length": 16,
    }


def test_a_model_of_transformers_teaches(folder: dict[str, object]) -> None:
    tokens = random_tokens()
    mask = torch.arange(16) < torch.tensor([[16], [9], [3]])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained("it").eval()
    expected = theirs(tokens, mask, output_hidden_states=True)
    hidden, logits = load_teacher("it", folder, 32).outputs(tokens, mask)
    close(logits, expected.logits.flip(1), atol=1e-4)
    close(hidden[mask], expected.hidden_states[-1][mask], atol=1e-4)
    with pytest.raises(UsageError, match=r"data\.max_length 30"):
        load_teacher("it", {**folder, "max_length": 30}, None)
    transformers.DistilBertForMaskedLM(theirs.config).save_pretrained("it")
    with pytest.raises(UsageError, match="masked"):
        load_teacher("it", folder, None)
