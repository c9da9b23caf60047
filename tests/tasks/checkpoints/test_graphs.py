"""Networks as ONNX graphs: ONNX Runtime gives the same outputs, for any batch size and length."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import tessera
import torch
import transformers
from PIL import Image
from torch import Tensor

from tasks.bert.export import NETWORKS
from tasks.checkpoints.exporting import NextTokenGraph, TextGraph, write_text_graph
from tasks.seq2seq.export import EncoderDecoderGraph
from tests.helpers.command import Console, python
from tests.helpers.tiny import NET, write_reviews
from tests.helpers.tiny_models import VOCAB, close, label, random_tokens, tiny

TEXTS = ["a good film", "a bad film, seen twice and not once more", "good"]
FIT = f"fit --preset tiny {NET} --data.source hub --data.path hub --data.tokenizer.vocabulary 100"
FIT += " --data.max_length 24 --trainer.max_steps 2 --data.batch_size 8 --run_dir r"
CLASSIFIERS: list[dict[str, Any]] = [
    {},
    {"position": "rotary", "order": "parallel", "qk_norm": True},
    {"position": "t5", "pool": "mean", "segments": 2},
    {"position": "alibi", "pool": "max", "kv_heads": 2},
    {"position": "sinusoidal", "pool": "attention", "feedforward": "swiglu"},
    {"position": "none", "attention": "additive", "conv_kernel": 3},
]
DECODERS: list[dict[str, Any]] = [
    {},
    {"position": "rotary", "order": "parallel", "qk_norm": True},
    {"position": "t5", "attention": "cosine"},
    {"position": "alibi", "kv_heads": 2},
    {"position": "sinusoidal", "norm": "rmsnorm", "feedforward": "swiglu", "bias": False},
]
GRAPHS: dict[str, type[TextGraph]] = {
    "bert": NETWORKS["bert"][1],
    "gpt": NextTokenGraph,
    "encoder_decoder": EncoderDecoderGraph,
    "prefix": EncoderDecoderGraph,
}


def outputs(session: Any, *inputs: Tensor) -> Tensor:
    """The only output of a graph."""
    names = [one.name for one in session.get_inputs()]
    arrays = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    (found,) = session.run(None, arrays)
    return torch.from_numpy(found)


def export(task: str, source: Path, output: str) -> Any:
    """Exports a run in a process of its own, and opens the graph."""
    line = f"tasks.{task} export --ckpt_path {source} --format onnx --output {output}"
    done = python(line, Path())
    assert f"InferenceSession('{output}" in done.stdout and done.stderr == ""
    file = output if output.endswith(".onnx") else f"{output}/model.onnx"
    return onnxruntime.InferenceSession(file)


@pytest.mark.slow
@pytest.mark.parametrize("kind, options", [
    *(("bert", options) for options in CLASSIFIERS),
    *((kind, options) for kind in ("gpt", "encoder_decoder", "prefix") for options in DECODERS),
    ("gpt", {"attention": "additive", "position": "none", "conv_kernel": 4}),
    ("encoder_decoder", {"order": "post", "conv_kernel": 2}),
], ids=lambda value: value if isinstance(value, str) else label(value))  # fmt: skip
def test_variants(kind: str, options: dict[str, Any]) -> None:
    graph = GRAPHS[kind](tiny(kind, **options))
    write_text_graph(graph, {}, Path())
    session = onnxruntime.InferenceSession("model.onnx")
    for rows, length in ((1, 1), (1, 16), (3, 7), (7, 2), (4, 16)):
        tokens = random_tokens(rows, length)
        lengths = torch.arange(rows).remainder(length) + 1  # (B,)
        mask = (torch.arange(length) < lengths[:, None]).long()  # (B, N)
        given = {
            "input_ids": tokens * mask,
            "attention_mask": mask,
            "decoder_input_ids": random_tokens(rows, 17 - length),
        }
        inputs = [given[name] for name in graph.inputs]
        with torch.no_grad():
            expected = graph(*inputs)
        close(outputs(session, *inputs), expected)
        if "attention_mask" in graph.inputs:  # what is at padding does not matter
            inputs[0] = torch.where(mask.bool(), tokens, VOCAB - 1)
            close(outputs(session, *inputs), expected)
        else:  # nor what comes later
            found = outputs(session, tokens)
            close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["bert", "mlm"])
def test_encoders(task: str, console: Console) -> None:
    write_reviews(Path("hub"))
    console.printed(FIT, task)
    session = export(task, Path("r"), "graph")
    names = sorted(path.name for path in Path("graph").iterdir())
    assert names == ["model.onnx", "tokenizer.json", "tokenizer_config.json"]
    assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask"]
    tokenizer = transformers.AutoTokenizer.from_pretrained("graph")
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    assert not mask.all()
    found = outputs(session, tokens, mask)
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


@pytest.mark.slow
def test_a_language_model_generates(lm_bytes: Path) -> None:
    session = export("lm", lm_bytes, "graph")
    tokenizer = transformers.AutoTokenizer.from_pretrained("graph")
    prompt = "two three"
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]  # (1, N)
    length = tokens.shape[1]
    for _ in range(8):
        following = outputs(session, tokens)[:, -1].argmax(-1, keepdim=True)  # (1, 1)
        tokens = torch.cat((tokens, following), 1)
    model = tessera.load(lm_bytes, kind=tessera.LanguageModel)
    expected = model.generate(prompt, temperature=0, max_new_tokens=8)
    assert tokenizer.decode(tokens[0, length:]) == expected
    with torch.no_grad():
        close(outputs(session, tokens), model.net.logits(model.net(tokens)))
    folder = Path(__file__).parents[3]  # of the source code
    assert str(folder).encode() not in Path("graph/model.onnx").read_bytes()


@pytest.mark.slow
def test_an_encoder_decoder_translates(translator: Path) -> None:
    session = export("seq2seq", translator, "graph")
    model = tessera.load(translator, kind=tessera.Translator)
    text = "two one"
    source, _ = model.model.tokenizer.encode_sources([text], 100)
    inputs = torch.tensor(source)
    target = torch.tensor([[model.metadata["start"]]])
    while target[0, -1] != model.metadata["end"] and target.shape[1] < 12:
        logits = outputs(session, inputs, torch.ones_like(inputs), target)  # (1, N, V)
        target = torch.cat((target, logits[:, -1].argmax(-1, keepdim=True)), 1)
    assert model.model.tokenizer.target.decode(target[0, 1:].tolist()) == model.translate(
        text, beams=1
    )


@pytest.mark.slow
def test_image_models(runs: Path) -> None:
    """The next pixels of image GPT, and the features of a masked autoencoder."""
    session = export("igpt", runs / "igpt", "graph")
    assert Path("graph/preprocessor_config.json").is_file()
    net = tessera.load(runs / "igpt", kind=tessera.ImageGenerator).net
    tokens = torch.randint(0, net.vocabulary, (3, net.max_length))
    with torch.no_grad():
        close(outputs(session, tokens), net.logits(net(tokens)))
    session = export("mae", runs / "mae", "features.onnx")
    (output,) = session.get_outputs()
    assert output.name == "last_hidden_state"
    model = tessera.load(runs / "mae", kind=tessera.MaskedImageModel)
    pixels = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    found = outputs(session, pixels[:, None] / 255)[:, model.net.config.prefix_tokens :].mean(1)
    close(found, model.embed([Image.fromarray(one.numpy()) for one in pixels]))
