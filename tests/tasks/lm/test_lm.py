"""Language models through the command line: metrics, samples, rates, and exports."""

import json
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import tessera
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F

from datamodules.corpus import CorpusData
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from modules.models.gpt import Decoder, DecoderConfig
from tasks.checkpoints.reading import KEY, load_config
from tasks.lm.architectures import load_model
from tasks.lm.streaming import prompt_tokens
from tasks.training import throughput
from tests.helpers.command import Console, Patch, run
from tests.helpers.results import checkpoint, logged, metrics, same, summary
from tests.helpers.tiny import NO_UPDATES, SMALL_LM, write_corpus

FIT = f"fit {SMALL_LM} --data.path texts --data.tokenizer.vocabulary 400"


def corpus(folder: str, packing: str) -> CorpusData:
    """The data of a run, with its tokenizer."""
    tokenizer = TokenizerConfig("bpe", 400, 1, False)
    data = CorpusData(None, "texts", packing, max_length=32, tokenizer=tokenizer)
    data.set_metadata(checkpoint(folder)[KEY]["metadata"])
    return data


def sum_losses(net: Decoder, data: CorpusData) -> tuple[float, int, int]:
    """Sum of the test losses, correct predictions, tokens: each row alone, all logits at once."""
    total = 0.0
    correct = 0
    count = 0
    for batch in data.test_dataloader():
        inputs = {k: batch[k] for k in ("tokens", "positions", "documents") if k in batch}
        for row, targets in enumerate(batch["targets"]):
            one = {name: value[row : row + 1] for name, value in inputs.items()}
            logits = net.logits(net(**one))[0]  # (T, V)
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
            correct += int((logits.argmax(-1) == targets).sum())
            count += int((targets >= 0).sum())
    return total, correct, count


@pytest.mark.parametrize("packing", ("windows", "documents"))
def test_metrics_are_those_of_the_text(packing: str, console: Console) -> None:
    files = sorted(write_corpus(Path("texts")).iterdir())
    text = "\n\n".join(path.read_text() for path in files)[:1500]
    for path in files:
        path.rename(Path("texts", f"train-{path.name}"))
    Path("texts/test").mkdir()
    Path("texts/test/a.txt").write_text(text)
    line = f"{FIT} --data.packing {packing} --model.ema 0.9 --run_dir r"
    out, _ = console.printed(line, "lm")
    found = summary("r")
    net = load_model("r/checkpoints/best.ckpt").net
    assert net.max_length == 32  # that of the data
    data = corpus("r", packing)
    data.setup("test")
    with torch.no_grad():
        total, correct, count = sum_losses(net, data)
    assert found["test/loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["test/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    bits = total / math.log(2)
    assert found["test/bits_per_byte"] == pytest.approx(bits / len(text.encode()), rel=1e-4)
    assert found["test/acc"] == pytest.approx(correct / count, abs=1e-6)
    assert found["tokens_per_s"] > 0 and 0 < found["mfu"] < 1
    assert Path("r/samples/best.txt").read_bytes().decode() == found["sample"] + "\n"
    assert re.sub(r"\s", "", found["sample"]) in re.sub(r"\s", "", out)
    tokenizer = checkpoint("r")[KEY]["metadata"]["tokenizer"]
    assert Path("r/tokenizer.json").read_text() == tokenizer


def test_training_metrics_of_a_step_over_all_of_the_text() -> None:
    write_corpus(Path("texts"))
    line = f"{FIT} {NO_UPDATES} --data.packing documents --data.batch_size 1000"
    line += " --trainer.max_epochs 2 --trainer.log_every_n_steps 2"
    assert run(f"{line} --run_dir r", "lm") == 0
    (row,) = (row for row in metrics("r") if "train/loss" in row)
    file = corpus("r", "documents").token_file("train")
    loss = float(row["train/loss"])
    bits = loss / math.log(2) * (len(file.tokens) - len(file)) / int(file.bytes[-1])
    assert float(row["train/bits_per_byte"]) == pytest.approx(bits, rel=1e-5)
    assert float(row["train/perplexity"]) == pytest.approx(math.exp(loss), rel=1e-5)
    assert {"train/grad_norm", "train/lr"} <= row.keys()


def test_samples_change_nothing_but_what_is_written() -> None:
    write_corpus(Path("texts"))
    line = f"{FIT} --model.net.stack.dropout 0.1 --trainer.limit_train_batches 4"
    line += " --trainer.accumulate_grad_batches 2"
    assert run(f"{line} --run_dir without", "lm") == 0
    line += " --model.samples.every 1 --model.samples.generation.temperature 0"
    assert run(f"{line} --model.samples.prompts [The,a] --run_dir with", "lm") == 0
    assert same(checkpoint("with")["state_dict"], checkpoint("without")["state_dict"])
    names = ["best.txt", "step_0000001.txt", "step_0000002.txt"]
    assert sorted(path.name for path in Path("with/samples").iterdir()) == names
    first, second = Path("with/samples/step_0000001.txt").read_text().split("-" * 80 + "\n")
    assert first.startswith("The") and second.startswith("a")


# Rates --------------------------------------------------------------------------------------------


def test_rates_count_no_padding() -> None:
    Path("texts").mkdir()
    for number in range(12):
        Path(f"texts/{number}.txt").write_text("ab" * 9)  # no two fit into a row
    line = f"{FIT} --data.tokenizer.kind character --data.packing documents"
    assert run(f"{line} --trainer.limit_val_batches 1 --run_dir r", "lm") == 0
    found = summary("r")
    (padding,) = logged("r", "train/padding")
    assert padding > 0.4
    expected = found["samples_per_s"] * 32 * (1 - padding)
    assert found["tokens_per_s"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("value_dim, embedding_width", [(8, None), (5, 12)])
def test_flops_are_those_that_torch_counts(
    tied: bool, value_dim: int, embedding_width: int | None
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    stack = {"width": 32, "depth": 3, "heads": 4, "kv_heads": 2, "causal": True}
    stack |= {"feedforward": "swiglu", "value_dim": value_dim}
    options = {"vocabulary": 50, "max_length": 16, "tied": tied, "stack": stack}
    options["embedding_width"] = embedding_width
    net = Decoder(load_config(DecoderConfig, options))
    tokens = torch.randint(0, 50, (4, 16))
    with FlopCounterMode(display=False) as counter:
        net.logits(net(tokens)).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    assert products == throughput.flops_per_token(net, 0) * tokens.numel()
    attention = throughput.flops_per_token(net, 16) - throughput.flops_per_token(net, 0)
    # q k^T and weights v, forward and backward
    assert attention == 3 * 4 * 16 * 2 * (8 + value_dim) * 3


def test_peak_is_that_of_the_fastest_product(monkeypatch: Patch) -> None:
    now = [0.0]
    seen: list[torch.dtype] = []
    seconds = [1.0, 0.1, 0.02, 0.1, 0.05, 0.05]

    def slow(a: torch.Tensor, b: torch.Tensor) -> None:
        now[0] += seconds[len(seen)]
        seen.append(a.dtype)

    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(throughput, "linear", slow)
    monkeypatch.setattr(throughput, "CPU_ROWS", 10)
    cpu = torch.device("cpu")
    assert throughput.matmul_peak(cpu, "bf16-mixed", 0.2) == pytest.approx(2000 / 0.02)
    assert seen == [torch.bfloat16] * 4  # the first is not measured
    assert throughput.matmul_peak(cpu, "32-true", 0.0) == pytest.approx(2000 / 0.05)
    assert seen[4] == torch.float32


# Pretrained weights and exports -------------------------------------------------------------------

MODELS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    | {"bos_token_id": 5, "eos_token_id": 6},
    "llama": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
}


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_hugging_face_and_back(kind: str, console: Console) -> None:
    import transformers

    texts = [path.read_text() for path in write_corpus(Path("texts")).iterdir()]
    tokenizer = Tokenizer.train(texts, TokenizerConfig("bpe", 400, lowercase=False))
    size = tokenizer.vocab_size
    config = transformers.AutoConfig.for_model(kind, vocab_size=size, **MODELS[kind])
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained("theirs", max_shard_size="20KB" if kind == "llama" else "1GB")
    assert (len([*Path("theirs").glob("*.safetensors")]) > 1) == (kind == "llama")
    Path("theirs/tokenizer.json").write_text(tokenizer.to_json())
    line = f"fit --data.path texts --model.pretrained theirs {NO_UPDATES}"
    line += " --trainer.max_steps 1 --model.samples.generation.max_new_tokens 3 --run_dir r"
    with torch.enable_grad():
        assert run(line, "lm") == 0
    assert checkpoint("r")[KEY]["metadata"]["max_length"] == 64  # the number of positions
    line = "export --ckpt_path r/checkpoints/last.ckpt --format hf --output back"
    out, _ = console.printed(line, "lm")
    assert f"{type(theirs).__name__}.from_pretrained('back')" in out
    assert len({path.stat().st_mode for path in Path("back").iterdir()}) == 1
    back = transformers.AutoModelForCausalLM.from_pretrained("back").eval()
    prompt = "The value of a [SEP]"  # of five characters, as in training
    inputs = transformers.AutoTokenizer.from_pretrained("back")(prompt, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    assert ids == [tokenizer.special_id("bos"), *tokenizer.encode_batch([prompt])[0]]
    logits = theirs(**inputs).logits
    torch.testing.assert_close(back(**inputs).logits, logits, atol=1e-4, rtol=0)
    net = load_model("theirs").net
    torch.testing.assert_close(net.logits(net(inputs["input_ids"])), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("documents", [1, 6], ids=["one document", "several"])
def test_an_exported_model_generates_and_scores_as_its_checkpoint(
    documents: int, console: Console
) -> None:
    import transformers

    text = next(write_corpus(Path("texts"), documents).iterdir()).read_text()
    line = f"{FIT} --data.dataset.val_fraction 0.2 --data.max_length 16 --model.optimizer.lr 1e-2"
    assert run(f"{line} --trainer.max_steps 20 --run_dir r", "lm") == 0
    assert run("export --ckpt_path r/checkpoints/last.ckpt --output theirs", "lm") == 0
    Path("text.txt").write_text(text)
    prompt = "The value of a"
    greedy = f'--prompt "{prompt}" --temperature 0'
    results = []
    for source in ("r/checkpoints/last.ckpt", "theirs"):
        found = []
        for options in (greedy, "--seed 3", f'--prompt "{prompt}" --beams 2'):
            line = f"generate --ckpt_path {source} --max_new_tokens 9 {options}"
            found += console.objects(line, "lm")
        line = f"score --ckpt_path {source} --input text.txt"
        results.append(found + console.objects(line, "lm"))
    assert results[0] == results[1]
    ours = load_model("theirs")
    ids = prompt_tokens(ours, prompt)
    assert ids == transformers.AutoTokenizer.from_pretrained("theirs")(prompt)["input_ids"]
    assert (ids[0] == ours.tokenizer.special_id("bos")) == (documents > 1)
    end = ours.tokenizer.special_id("eos") if documents > 1 else None
    assert transformers.AutoConfig.from_pretrained("theirs").eos_token_id == end
    assert run("export --ckpt_path theirs --output again", "lm") == 0
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        first, second = (json.loads(Path(d, name).read_text()) for d in ("theirs", "again"))
        assert first == second, name


def test_safetensors(lm_bytes: Path) -> None:
    line = f"export --ckpt_path {lm_bytes} --format safetensors --output m.safetensors"
    assert run(line, "lm") == 0
    with safe_open("m.safetensors", "pt") as file:
        config, metadata = (json.loads(file.metadata()[name]) for name in ("config", "metadata"))
    net = Decoder(load_config(DecoderConfig, config))
    net.load_state_dict(load_file("m.safetensors"))
    assert same(dict(net.state_dict()), dict(load_model(str(lm_bytes)).net.state_dict()))
    assert Tokenizer.from_json(metadata["tokenizer"]).vocab_size == net.vocabulary


def test_a_prompt_that_cannot_be_read_does_not_end_a_run(console: Console) -> None:
    write_corpus(Path("texts"))
    line = f"fit {SMALL_LM} --data.path texts --data.tokenizer.kind character --run_dir r"
    line += " --trainer.max_steps 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1"
    with pytest.warns(UserWarning, match="'ξ'"):
        console.printed(f"{line} --model.samples.prompts '[ξ, a]'", "lm")
    assert summary("r")["sample"].startswith("a")
    with pytest.warns(UserWarning, match="'ξ'"):
        more = "--model.samples.prompts [ξ] --model.samples.every 1"
        console.printed(f"{line} {more} --run_dir none", "lm")
    assert "sample" not in summary("none") and not Path("none/samples").exists()


def test_too_few_outputs_are_refused(console: Console) -> None:
    write_corpus(Path("texts"))
    line = f"fit {SMALL_LM} --data.path texts --model.net.tied false --run_dir r"
    named = "--model.net.output_vocabulary 5"
    console.refused(f"{line} {named}", named, task="lm")


@pytest.mark.parametrize("length", ["", "--trainer.max_epochs 1", "--trainer.max_steps 1"])
def test_few_steps_are_told_unless_they_were_asked_for(length: str, console: Console) -> None:
    write_corpus(Path("texts"))
    line = f"{FIT} --run_dir r --trainer.limit_train_batches 1 --trainer.limit_val_batches 1"
    line = line.replace("--trainer.max_epochs 1", "") + f" --trainer.limit_test_batches 0 {length}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        console.printed(line, "lm")
    told = [str(one.message) for one in caught if "--trainer.max_epochs" in str(one.message)]
    assert bool(told) == (length == "")
    assert all("--data.batch_size" in message for message in told)


def test_packed_documents_are_scored_apart(console: Console) -> None:
    """As `test` and Python do."""
    texts = [f"document {i} of {i * 37 % 50} words: {'w ' * (i % 9)}end" for i in range(40)]
    Path("docs.txt").write_text("\n\n".join(texts))
    line = f"fit {SMALL_LM} --data.path docs.txt --data.packing documents --run_dir packed"
    line += " --data.dataset.blank_lines true --data.tokenizer.vocabulary 300"
    assert run(f"{line} --model.optimizer.lr 0.01 --trainer.max_steps 20", "lm") == 0
    line = "score --ckpt_path packed --input docs.txt --data.blank_lines true"
    (found,) = console.objects(line, "lm")
    scores = tessera.load("packed").score(texts)
    tokens = sum(score.tokens for score in scores)
    loss = sum(score.loss * score.tokens for score in scores) / tokens
    assert (found["tokens"], found["loss"]) == (tokens, pytest.approx(loss, rel=1e-5))
    out, _ = console.printed("score --ckpt_path packed --text 'the end [/b]'", "lm")
    assert "the end [/b]" in out


def test_documents_of_one_token_are_refused(console: Console) -> None:
    Path("docs.txt").write_text("\n\n".join(["a text", "another text"] * 30))
    Path("short.txt").write_text("\n\n".join("ttt"))
    line = f"fit {SMALL_LM} --data.path docs.txt --data.packing documents --run_dir packed"
    line += " --data.tokenizer.kind character"  # one document: no separator
    assert run(f"{line} --trainer.max_steps 1", "lm") == 0
    line = "score --ckpt_path packed --input short.txt --data.blank_lines true"
    console.refused(line, "in each document", task="lm")
