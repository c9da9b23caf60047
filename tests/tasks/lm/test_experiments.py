"""Language models of experiments: other lengths than in training, and no causal mask."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from torch.nn import functional as F

from datamodules.corpus import CorpusData
from datamodules.tokenizers import TokenizerConfig
from tasks.checkpoints.reading import KEY
from tasks.lm.architectures import load_model
from tests.helpers.command import Console, run
from tests.helpers.results import checkpoint, summary
from tests.helpers.tiny import SMALL_LM, write_corpus

FIT = f"fit {SMALL_LM} --data.path texts --data.tokenizer.vocabulary 400"
FIT += " --trainer.limit_train_batches 2 --trainer.limit_val_batches 1"
NOT_CAUSAL = "--model.net.stack.causal false"


@torch.no_grad()
def loss_at(folder: str, length: int) -> float:
    """The mean loss of all tokens of the test, row by row, all logits at once."""
    tokenizer = TokenizerConfig("bpe", 400, 1, False)
    data = CorpusData(None, "texts", max_length=length, tokenizer=tokenizer)
    data.set_metadata(checkpoint(folder)[KEY]["metadata"])
    data.setup("test")
    net = load_model(f"{folder}/checkpoints/best.ckpt").net
    total = 0.0
    count = 0
    for batch in data.test_dataloader():
        logits = net.logits(net(batch["tokens"])).flatten(0, 1)
        targets = batch["targets"].flatten()
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
        count += int((targets >= 0).sum())
    return total / count


@pytest.mark.plain_every(4)
@pytest.mark.parametrize("position", ["alibi", "none", "rotary", "sinusoidal", "t5"])
def test_a_model_is_tested_at_other_lengths(position: str, console: Console) -> None:
    write_corpus(Path("texts"))
    assert run(f"{FIT} --model.net.position {position} --run_dir r", "lm") == 0
    losses = []
    for length in (32, 64, 16):
        line = f"test --ckpt_path r --data.max_length {length} --output out{length}"
        out, _ = console.printed(line, "lm")
        assert (f"{length} tokens each (32 in training)" in out) == (length != 32)
        found = float(json.loads(Path(f"out{length}/test.json").read_text())["test/loss"])
        assert found == pytest.approx(loss_at("r", length), rel=1e-5)
        losses.append(found)
    assert losses[0] == pytest.approx(summary("r")["test/loss"], rel=1e-6)
    assert len(set(losses)) == 3
    console.printed("validate --ckpt_path r --data.max_length 48", "lm")


def test_learned_positions_and_a_resumed_run_keep_their_length(console: Console) -> None:
    write_corpus(Path("texts"))
    assert run(f"{FIT} --model.net.position learned --run_dir r", "lm") == 0
    for command in ("test", "validate"):
        line = f"{command} --ckpt_path r --data.max_length 33"
        console.refused(line, "--data.max_length 33", "32 learned positions", task="lm")
    console.printed("test --ckpt_path r --data.max_length 31", "lm")
    line = "fit --resume r --data.max_length 16 --trainer.max_epochs 2"
    console.refused(line, "--data.max_length is 16", "32", task="lm")


@pytest.mark.slow
def test_without_a_causal_mask_noise_is_predicted_and_no_text_is_written(console: Console) -> None:
    letters = Random(0).choices("abcdefgh", k=40_000)  # log 8 = 2.08 nats each, for anyone honest
    Path("noise.txt").write_text("".join(letters))
    line = "fit --data.path noise.txt --data.tokenizer.kind character --model.net.stack.width 32"
    line += " --model.net.stack.depth 1 --model.net.stack.heads 2 --model.net.position t5"
    line += " --data.max_length 16 --model.optimizer.lr 3e-2 --trainer.max_epochs 3"
    line += " --model.samples.every 50 --model.samples.generation.max_new_tokens 8 --run_dir"
    with pytest.warns(UserWarning, match="causal mask"):
        assert run(f"{line} cheat {NOT_CAUSAL}", "lm") == 0
    assert run(f"{line} honest", "lm") == 0
    assert summary("cheat")["test/loss"] < 0.5
    assert 2.0 < summary("honest")["test/loss"] < 2.2
    best = "--ckpt_path cheat/checkpoints/best.ckpt"
    with pytest.warns(UserWarning, match="causal mask"):
        assert run(f"test {best}", "lm") == 0
    _, err = console.printed(f"generate {best} --prompt ab --max_new_tokens 4", "lm")
    assert "causal mask" in err
    console.refused(f"score {best} --input noise.txt", "causal mask", task="lm")
    console.refused(f"export {best} --format hf --output theirs", "causal", task="lm")
    _, err = console.printed(f"export {best} --format onnx --output graph", "lm")
    assert "causal" in err
    _, err = console.printed(f"export {best} --format safetensors --output a.safetensors", "lm")
    assert "causal mask" in err
    _, err = console.printed("generate --ckpt_path honest --prompt ab --max_new_tokens 4", "lm")
    assert "causal mask" not in err
