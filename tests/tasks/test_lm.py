"""Language models through the command line: runs, their figures, what goes in and comes out."""

import json
import math
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from datamodules.corpus import CorpusData
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from modules.models.gpt import Decoder, DecoderConfig
from tasks.checkpoints.reading import KEY, load_config, net_weights
from tasks.lm.architectures import load_model
from tasks.lm.streaming import prompt_tokens
from tasks.training import throughput
from tasks.training.throughput import flops_per_token
from tests.tasks.command import (
    DEFAULT_SECONDS,
    SMALL_LM,
    checkpoint,
    metrics,
    process,
    run,
    same,
    write_corpus,
)
from tests.tasks.forked import python
from tests.tasks.test_resume import KILL

FILES = "--data.source files --data.path texts --data.tokenizer.vocabulary 400"
FIT = f"fit {SMALL_LM} {FILES}"
STILL = "--model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"


def summary(folder: str | Path) -> dict[str, Any]:
    """What a run's `summary.json` holds."""
    return json.loads(Path(folder, "summary.json").read_text())


@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    start = time.perf_counter()
    done = process("fit", task="lm", cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "runs/lm/latest")
    assert found["test/bits_per_byte"] < 2.3 and len(found["sample"]) > 100
    assert seconds <= DEFAULT_SECONDS


def by_hand(net: Decoder, data: CorpusData) -> tuple[float, int, int]:
    """Sum of the test losses by `F.cross_entropy`, right guesses, tokens; each row alone, all its logits at once."""
    total, right, count = 0.0, 0, 0
    for batch in data.test_dataloader():
        for row in range(len(batch["tokens"])):
            one = {
                name: batch[name][row : row + 1]
                for name in ("tokens", "positions", "documents")
                if name in batch
            }
            logits = net.logits(net(**one)).flatten(0, 1)  # (T, V)
            total += float(F.cross_entropy(logits, batch["targets"][row], reduction="sum"))
            right += int((logits.argmax(-1) == batch["targets"][row]).sum())
            count += int((batch["targets"][row] >= 0).sum())
    return total, right, count


@pytest.mark.parametrize("packing", ("windows", "documents"))
def test_figures_are_those_of_the_text(packing: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n\n".join(path.read_text() for path in sorted(write_corpus(Path("texts")).iterdir()))
    Path("texts/test").mkdir()
    Path("texts/test/a.txt").write_text(text[:1500])
    for path in list(Path("texts").glob("*.txt")):
        path.rename(Path("texts", f"train-{path.name}"))
    assert run(f"{FIT} --data.packing {packing} --model.ema 0.9 --run_dir r", "lm") == 0
    said = capsys.readouterr().out
    found, saved = summary("r"), checkpoint("r", "best")
    net = Decoder(load_config(DecoderConfig, saved[KEY]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    assert net.max_length == 32  # that of the data
    data = CorpusData(
        "files", "texts", packing, max_length=32, tokenizer=TokenizerConfig("bpe", 400, 1, False)
    )
    data.set_metadata(saved[KEY]["metadata"])
    data.setup("test")
    with torch.no_grad():
        total, right, count = by_hand(net, data)
    assert found["test/loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["test/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert found["test/bits_per_byte"] == pytest.approx(
        total / math.log(2) / len(text[:1500].encode()), rel=1e-4
    )
    assert found["test/acc"] == pytest.approx(right / count, abs=1e-6)
    assert Path("r/samples/best.txt").read_bytes().decode() == found["sample"] + "\n"
    assert re.sub(r"\s", "", found["sample"]) in re.sub(r"\s", "", said)
    assert found["tokens_per_s"] > 0 and 0 < found["mfu"] < 1
    logged = [row for row in metrics("r") if "train/loss" in row]
    assert {"train/loss", "train/bits_per_byte", "train/grad_norm", "train/lr"} <= logged[0].keys()
    for row in logged:
        assert float(row["train/perplexity"]) == pytest.approx(
            math.exp(float(row["train/loss"])), rel=1e-5
        )
    assert Path("r/tokenizer.json").read_text() == saved[KEY]["metadata"]["tokenizer"]


def test_bits_per_byte_in_training_are_those_of_the_batch() -> None:
    write_corpus(Path("texts"))
    line = f"{FIT} {STILL} --data.packing documents --trainer.limit_train_batches 3 --trainer.log_every_n_steps 2"
    assert (
        run(f"{line} --data.batch_size 1000 --run_dir r", "lm") == 0
    )  # each step takes all of the text
    assert [row for row in metrics("r") if "train/loss" in row] == []  # one step only
    assert run(f"{line} --data.batch_size 1000 --trainer.max_epochs 2 --run_dir s", "lm") == 0
    (row,) = (row for row in metrics("s") if "train/loss" in row)
    data = CorpusData(
        "files",
        "texts",
        "documents",
        max_length=32,
        tokenizer=TokenizerConfig("bpe", 400, 1, False),
    )
    data.set_metadata(checkpoint("s")[KEY]["metadata"])
    tokens, bytes_ = (
        len(data.token_file("train").tokens) - len(data.file("train")),
        int(data.token_file("train").bytes[-1]),
    )
    expected = float(row["train/loss"]) / math.log(2) * tokens / bytes_
    assert float(row["train/bits_per_byte"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_killed_in_mid_epoch_and_continued_ends_with_the_same_bits(tmp_path: Path) -> None:
    write_corpus(Path("texts"))
    line = f"{FIT} --model.net.stack.dropout 0.1 --checkpoint.every_n_train_steps 3 --trainer.max_epochs 2"
    line += " --model.samples.every 4 --trainer.limit_train_batches 10"
    assert run(f"{line} --run_dir whole", "lm") == 0
    done = process(f"{line} --run_dir cut", KILL.format(step=13), task="lm", cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint("cut")["global_step"] == 12
    assert run("fit --resume cut", "lm") == 0
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(checkpoint("cut")[part], checkpoint("whole")[part]), part
    assert metrics("cut") == metrics("whole")
    texts = {path.name: path.read_text() for path in Path("cut/samples").iterdir()}
    assert texts == {path.name: path.read_text() for path in Path("whole/samples").iterdir()}
    assert sorted(texts) == ["best.txt", *(f"step_{step:07}.txt" for step in (4, 8, 12, 16, 20))]


def test_samples_change_nothing_but_what_is_written() -> None:
    write_corpus(Path("texts"))
    line = f"{FIT} --model.net.stack.dropout 0.1 --trainer.limit_train_batches 6 --trainer.accumulate_grad_batches 2"
    assert run(f"{line} --run_dir without", "lm") == 0
    options = "--model.samples.every 1 --model.samples.generation.temperature 0 --model.samples.prompts [The,a]"
    assert run(f"{line} {options} --run_dir with", "lm") == 0
    assert same(checkpoint("with")["state_dict"], checkpoint("without")["state_dict"])
    assert sorted(path.name for path in Path("with/samples").iterdir()) == [
        "best.txt",
        *(f"step_000000{step}.txt" for step in (1, 2, 3)),
    ]
    first, second = Path("with/samples/step_0000001.txt").read_text().split("-" * 80 + "\n")
    assert first.startswith("The") and second.startswith("a")


def test_a_step_of_accumulated_batches_is_that_of_a_large_one() -> None:
    write_corpus(Path("texts"))
    line = f"{FIT} --model.optimizer.warmup 0 --trainer.limit_val_batches 1"
    assert (
        run(f"{line} --trainer.limit_train_batches 1 --data.batch_size 8 --run_dir large", "lm")
        == 0
    )
    parts = (
        "--trainer.limit_train_batches 2 --trainer.accumulate_grad_batches 2 --data.batch_size 4"
    )
    assert run(f"{line} {parts} --run_dir parts", "lm") == 0
    large, small = checkpoint("large"), checkpoint("parts")
    assert large["global_step"] == small["global_step"] == 1
    moments = [
        {name: s["exp_avg"] for name, s in c["optimizer_states"][0]["state"].items()}
        for c in (large, small)
    ]
    for name, value in moments[0].items():
        torch.testing.assert_close(moments[1][name], value, atol=1e-6, rtol=1e-4)


def test_z_loss_and_recomputed_activations() -> None:
    write_corpus(Path("texts"))
    line = f"{FIT} --trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1"
    assert run(f"{line} --run_dir plain", "lm") == 0
    assert run(f"{line} --model.net.stack.checkpoint_activations true --run_dir again", "lm") == 0
    assert run(f"{line} --model.z_loss 0.1 {STILL} --run_dir z", "lm") == 0
    plain, again, z = (metrics(name) for name in ("plain", "again", "z"))
    assert (
        same(checkpoint("plain")["state_dict"], checkpoint("again")["state_dict"])
        and plain == again
    )
    assert float(z[0]["train/loss"]) > float(plain[0]["train/loss"]) + 1  # log V squared, times 0.1
    net = checkpoint("z")["tessera"]["net"]
    assert abs(float(z[-1]["test/loss"]) - math.log(net["vocabulary"])) < 0.5  # without it


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: Path) -> None:
    write_corpus(Path("texts"))
    two = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --data.batch_size 2"
    line = f"{FIT} --model.samples.every 5"
    done = python(f"tasks.lm {line} {two} --run_dir two", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(text) for text in ("Results", "sample:", "next:")] == [1, 1, 1]
    assert run(f"{line} --run_dir one", "lm") == 0
    one, pair = summary("one"), summary("two")
    assert one["steps"] == pair["steps"]
    for name in ("test/loss", "test/bits_per_byte", "test/acc"):
        assert pair[name] == pytest.approx(one[name], rel=1e-3), name
    assert {path.name for path in Path("two/samples").iterdir()} == {
        path.name for path in Path("one/samples").iterdir()
    }


# Rates --------------------------------------------------------------------------------------------------------------


def test_rates_count_no_padding() -> None:
    Path("texts").mkdir()
    for number in range(12):
        Path(f"texts/{number}.txt").write_text("ab" * 9)  # no two fit into a row
    line = f"{FIT} --data.tokenizer.kind character --data.packing documents --trainer.limit_val_batches 1"
    assert run(f"{line} --run_dir r", "lm") == 0
    found, rows = summary("r"), [row for row in metrics("r") if "train/padding" in row]
    assert float(rows[0]["train/padding"]) > 0.4
    share = 1 - float(rows[0]["train/padding"])
    assert found["tokens_per_s"] == pytest.approx(found["samples_per_s"] * 32 * share, rel=0.02)


def test_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for tied in (True, False):
        options = {
            "width": 32,
            "depth": 3,
            "heads": 4,
            "kv_heads": 2,
            "feedforward": "swiglu",
            "causal": True,
        }
        config = load_config(
            DecoderConfig, {"vocabulary": 50, "max_length": 16, "tied": tied, "stack": options}
        )
        net, tokens = Decoder(config), torch.randint(0, 50, (4, 16))
        with FlopCounterMode(display=False) as counter:
            net.logits(net(tokens)).sum().backward()
        aten, found = torch.ops.aten, counter.get_flop_counts()["Global"]
        assert found[aten.mm] + found.get(aten.addmm, 0) == flops_per_token(net, 0) * tokens.numel()
        assert (
            flops_per_token(net, 16) - flops_per_token(net, 0) == 3 * 4 * 16 * 4 * 8 * 3
        )  # q k^T and weights v, thrice


def test_the_peak_is_that_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen, pauses = [0.0], [], [1.0, 0.1, 0.02, 0.1, 0.05, 0.05]

    def slow(a: torch.Tensor, b: torch.Tensor) -> None:
        now[0] += pauses[len(seen)]
        seen.append((tuple(a.shape), tuple(b.shape), a.dtype))

    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(throughput, "linear", slow)
    monkeypatch.setitem(throughput.MATRIX_SIZES, "cpu", 10)
    assert throughput.matmul_peak(torch.device("cpu"), "bf16-mixed", 1.2) == pytest.approx(
        2000 / 0.02
    )
    assert seen == [((10, 10), (10, 10), torch.bfloat16)] * 4  # the first is not measured
    assert throughput.matmul_peak(torch.device("cpu"), "32-true", 0.0) == pytest.approx(2000 / 0.05)
    assert seen[4][2] == torch.float32


# Pretrained weights and exports -------------------------------------------------------------------------------------


def test_a_run_goes_on_from_a_checkpoint_with_its_tokenizer(lm_bytes: Path) -> None:
    write_corpus(Path("texts"), count=4)
    line = "fit --data.source files --data.path texts --data.max_length 32 --model.samples.generation.max_new_tokens 4 "
    line += f"--trainer.max_epochs 1 {STILL} --model.net.stack.dropout 0.1"
    assert run(f"{line} --model.pretrained {lm_bytes} --run_dir r", "lm") == 0
    theirs, ours = torch.load(lm_bytes, weights_only=True), checkpoint("r")
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, atol=1e-6, rtol=0)
    assert ours[KEY]["metadata"]["tokenizer"] == theirs[KEY]["metadata"]["tokenizer"]
    assert ours[KEY]["net"]["position"] == "rotary" and ours[KEY]["net"]["stack"]["dropout"] == 0.1


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
MODELS = {
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 5,
        "eos_token_id": 6,
    },
    "llama": {
        **SIZES,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_parameters": SCALED,
    },
}


@pytest.mark.parametrize("kind", MODELS)
def test_hugging_face_and_back(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    texts = [path.read_text() for path in write_corpus(Path("texts")).iterdir()]
    tokenizer = Tokenizer.train(texts, TokenizerConfig("bpe", 400, lowercase=False))
    torch.manual_seed(0)
    options = transformers.AutoConfig.for_model(
        kind, vocab_size=tokenizer.vocab_size, **MODELS[kind]
    )
    theirs = transformers.AutoModelForCausalLM.from_config(options).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained("theirs", max_shard_size="20KB" if kind == "llama" else "1GB")
    assert (len([*Path("theirs").glob("*.safetensors")]) > 1) == (kind == "llama")
    Path("theirs/tokenizer.json").write_text(tokenizer.to_json())
    line = f"fit --data.source files --data.path texts --model.pretrained theirs {STILL}"
    assert (
        run(
            f"{line} --trainer.max_steps 1 --model.samples.generation.max_new_tokens 3 --run_dir r",
            "lm",
        )
        == 0
    )
    assert run("export --ckpt_path r/checkpoints/last.ckpt --format hf --output back", "lm") == 0
    assert checkpoint("r")[KEY]["metadata"]["max_length"] == 64  # as many as there are positions
    assert (
        len({path.stat().st_mode for path in Path("back").iterdir()}) == 1
    )  # whoever may read one may read all
    assert f"{type(theirs).__name__}.from_pretrained('back')" in capsys.readouterr().out
    back = transformers.AutoModelForCausalLM.from_pretrained("back").eval()
    words = transformers.AutoTokenizer.from_pretrained("back")(
        "The value of a", return_tensors="pt"
    )
    with torch.no_grad():
        torch.testing.assert_close(back(**words).logits, theirs(**words).logits, atol=1e-4, rtol=0)
    ours = load_model("theirs")
    assert ours.net.max_length == 64
    with torch.no_grad():
        logits = ours.net.logits(ours.net(words["input_ids"]))
        torch.testing.assert_close(logits, theirs(**words).logits, atol=1e-4, rtol=0)
    read = words["input_ids"][0].tolist()
    assert read == [
        tokenizer.special_id("bos"),
        *tokenizer.encode_batch(["The value of a"])[0],
    ]  # as in training
    greedy = theirs.generate(
        **words, max_new_tokens=40, do_sample=False, eos_token_id=6, pad_token_id=0
    )
    line = 'generate --ckpt_path theirs --prompt "The value of a" --temperature 0 --max_new_tokens 40 --json'
    assert run(line, "lm") == 0
    assert json.loads(capsys.readouterr().out)["text"] == tokenizer.decode(
        greedy[0, len(read) :].tolist()
    )


@pytest.mark.parametrize("documents", [1, 6], ids=["one document", "several"])
def test_an_exported_model_writes_and_scores_what_its_checkpoint_does(
    documents: int, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    prompt, text = (
        "The value of a",
        next(write_corpus(Path("texts"), documents).iterdir()).read_text(),
    )
    line = f"{FIT} --data.dataset.val_fraction 0.2 --data.max_length 16 --model.optimizer.lr 1e-2 --trainer.max_steps 20"
    assert run(f"{line} --run_dir r", "lm") == 0
    assert run("export --ckpt_path r/checkpoints/last.ckpt --output theirs", "lm") == 0
    Path("text.txt").write_text(text)
    said = []
    for source in ("r/checkpoints/last.ckpt", "theirs"):
        capsys.readouterr()
        for options in (
            f'--prompt "{prompt}" --temperature 0',
            "--seed 3",
            f'--prompt "{prompt}" --beams 2',
        ):
            assert (
                run(f"generate --ckpt_path {source} --max_new_tokens 9 --json {options}", "lm") == 0
            )
        assert run(f"score --ckpt_path {source} --data.path text.txt --json", "lm") == 0
        said.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert said[0] == said[1]
    ours, theirs = load_model("theirs"), transformers.AutoTokenizer.from_pretrained("theirs")
    assert prompt_tokens(ours, prompt) == theirs(prompt)["input_ids"]
    assert (prompt_tokens(ours, prompt)[0] == ours.tokenizer.special_id("bos")) == (documents > 1)
    end = transformers.AutoConfig.from_pretrained("theirs").eos_token_id
    assert end == (ours.tokenizer.special_id("eos") if documents > 1 else None)
    assert run("export --ckpt_path theirs --output again", "lm") == 0
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads(Path("again", name).read_text()) == json.loads(
            Path("theirs", name).read_text()
        )


def test_safetensors(lm_bytes: Path) -> None:
    from safetensors import safe_open

    assert (
        run(f"export --ckpt_path {lm_bytes} --format safetensors --output m.safetensors", "lm") == 0
    )
    with safe_open("m.safetensors", "pt") as file:
        config, metadata = (json.loads(file.metadata()[name]) for name in ("config", "metadata"))
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    net = Decoder(load_config(DecoderConfig, config))
    net.load_state_dict(weights)
    assert same(dict(net.state_dict()), dict(load_model(str(lm_bytes)).net.state_dict()))
    assert Tokenizer.from_json(metadata["tokenizer"]).vocab_size == net.vocabulary


def test_what_the_default_run_suggests_works(capsys: pytest.CaptureFixture[str]) -> None:
    brief = "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1"
    brief += " --model.samples.generation.max_new_tokens 8 --model.net.stack.depth 1"
    assert run(f"fit {brief} --trainer.max_epochs 1 --run_dir r", "lm") == 0
    lines = re.findall(r"python -m tasks\.lm (.*)", capsys.readouterr().out)
    assert {line.split()[0] for line in lines} == {"fit", "generate", "score", "export"}
    Path("FILE.txt").write_text("An object is what has a type. " * 40)
    for line in lines:
        assert run(line.replace("epochs N", "epochs 2").replace("FILE", "FILE.txt"), "lm") == 0, (
            capsys.readouterr().err
        )
