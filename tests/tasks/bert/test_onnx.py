"""Encoders as ONNX graphs: ONNX Runtime gives the same logits, for any batch size and length."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import tessera
import torch
import transformers
from torch import Tensor

from tasks.bert.export import NETWORKS
from tasks.checkpoints.exporting import write_text_graph
from tests.helpers.command import Console, python
from tests.helpers.tiny import NET, write_reviews
from tests.helpers.tiny_models import VOCAB, close, label, random_tokens, tiny

TEXTS = ["a good film", "a bad film, seen twice and not once more", "good"]
FIT = f"fit --preset tiny {NET} --data.source hub --data.path hub --data.tokenizer.vocabulary 100"
FIT += " --data.max_length 24 --trainer.max_steps 2 --data.batch_size 8 --run_dir r"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"position": "rotary", "order": "parallel", "qk_norm": True},
    {"position": "t5", "pool": "mean", "segments": 2},
    {"position": "alibi", "pool": "max", "kv_heads": 2},
    {"position": "sinusoidal", "pool": "attention", "feedforward": "swiglu"},
    {"position": "none", "attention": "additive", "conv_kernel": 3},
]


def logits_of(session: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """The output of a graph."""
    inputs = {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()}
    return torch.from_numpy(session.run(["logits"], inputs)[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=label)
def test_variants(options: dict[str, Any]) -> None:
    graph = NETWORKS["bert"][1](tiny("bert", **options))
    write_text_graph(graph, {"pad_id": 0}, Path())
    session = onnxruntime.InferenceSession("model.onnx")
    for rows, length in ((1, 1), (1, 16), (3, 7), (7, 2), (4, 16)):
        tokens = random_tokens(rows, length)
        lengths = torch.arange(rows).remainder(length) + 1  # (B,)
        mask = (torch.arange(length) < lengths[:, None]).long()  # (B, N)
        with torch.no_grad():
            expected = graph.net(tokens * mask, mask.bool())
        close(logits_of(session, tokens * mask, mask), expected)
        changed = torch.where(mask.bool(), tokens, VOCAB - 1)
        close(logits_of(session, changed, mask), expected)  # what is at padding does not matter


@pytest.mark.slow
@pytest.mark.parametrize("task", ["bert", "mlm"])
def test_exported_runs(task: str, console: Console) -> None:
    write_reviews(Path("hub"))
    console.printed(FIT, task)
    done = python(f"tasks.{task} export --ckpt_path r --format onnx --output graph", Path())
    assert "graph/model.onnx" in done.stdout and done.stderr == ""
    names = sorted(path.name for path in Path("graph").iterdir())
    assert names == ["model.onnx", "tokenizer.json", "tokenizer_config.json"]
    session = onnxruntime.InferenceSession("graph/model.onnx")
    assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask"]
    tokenizer = transformers.AutoTokenizer.from_pretrained("graph")
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    assert not mask.all()
    found = logits_of(session, tokens, mask)
    model = tessera.load("r")
    if task == "bert":
        assert '"neg"' in session.get_modelmeta().custom_metadata_map["class_names"]
        expected = [one.probabilities for one in model.predict(TEXTS)]
        rows = [[one[name] for name in model.class_names] for one in expected]
        close(found.softmax(-1), torch.tensor(rows))
        return
    with torch.no_grad():
        logits = model.net(tokens, mask.bool(), where=mask.bool())  # (S, V)
    assert found.shape[:2] == tokens.shape
    close(found[mask.bool()], logits)
