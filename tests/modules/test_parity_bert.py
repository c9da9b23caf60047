"""Our encoders against Hugging Face's BERT, DistilBERT and RoBERTa, weights copied over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.models.bert import BERT_PRESETS, BertClassifier, BertConfig, BertMaskedLM
from modules.pretrained.bert import FAMILIES, HEADS
from modules.pretrained.family import config_from_huggingface
from modules.pretrained.weights import load_weights

transformers = pytest.importorskip("transformers")

SIZES: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
}
SIZES["roberta"] = SIZES["bert"]
VOCABULARY = {"bert": 30522, "distilbert": 30522, "roberta": 50265}  # as published
BASE = {"distilbert": {"dim": 768, "n_layers": 12, "n_heads": 12, "hidden_dim": 3072}}


def theirs(
    family: str, head: str, sizes: dict[str, Any] | None = None, **options: Any
) -> nn.Module:
    """Their model with weights among which no zeros or ones hide a mistake."""
    kind = FAMILIES[family].architecture
    pad = 1 if family == "roberta" else 0
    sizes = SIZES[family] if sizes is None else sizes
    settings = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 60,
            "max_position_embeddings": 24,
            "num_labels": 3,
            "pad_token_id": pad,
            **sizes,
            **options,
        },
        architectures=[kind + head],
    )
    with torch.device("meta"):
        model = getattr(transformers, kind + head)(settings)
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(
                torch.arange(value.shape[1])[None]
                if name.endswith("position_ids")
                else torch.zeros_like(value)
            )
        for name, value in model.named_parameters():
            value.normal_(std=0.05)
            if "norm" in name.lower() and name.endswith("weight"):
                value += 1.0
    return model


def batch(
    family: str, lengths: tuple[int, ...] = (11, 5, 8), vocabulary: int = 60
) -> dict[str, Tensor]:
    """Right-padded texts, two segments for BERT."""
    padding_mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    tokens = torch.randint(2, vocabulary, padding_mask.shape).masked_fill(
        ~padding_mask, 1 if family == "roberta" else 0
    )
    segments = (
        {"segments": (torch.arange(max(lengths)) > 3).long().expand_as(tokens)}
        if family == "bert"
        else {}
    )
    return {"tokens": tokens, "padding_mask": padding_mask, **segments}


def run_theirs(model: nn.Module, texts: dict[str, Tensor], **options: Any) -> Any:
    names = {"tokens": "input_ids", "padding_mask": "attention_mask", "segments": "token_type_ids"}
    with torch.inference_mode():
        return model(**{names[key]: value.long() for key, value in texts.items()}, **options)


def ours(family: str, model: Any, kind: type[nn.Module]) -> Any:
    name, config = config_from_huggingface(model.config.to_dict(), FAMILIES)
    assert name == family
    net = kind(config).eval()
    missing = load_weights(
        net, FAMILIES[family].weights_from_external(model.state_dict(), config), HEADS
    )
    assert not missing
    return net


def far(one: Tensor, two: Tensor) -> float:
    assert one.shape == two.shape
    return (one - two).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_classification_and_hidden_states(family: str) -> None:
    model = theirs(family, "ForSequenceClassification")
    net, texts = ours(family, model, BertClassifier), batch(family)
    expected = run_theirs(model, texts, output_hidden_states=True)
    with torch.inference_mode():
        assert far(net(**texts), expected.logits) <= 1e-5
        hidden = net.encoder(**texts)
        assert (
            far(hidden[texts["padding_mask"]], expected.hidden_states[-1][texts["padding_mask"]])
            <= 1e-5
        )
    assert expected.logits.std() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_tokens(family: str) -> None:
    model = theirs(family, "ForMaskedLM")
    net, texts = ours(family, model, BertMaskedLM), batch(family)
    where = texts["padding_mask"] & (torch.rand(texts["padding_mask"].shape) < 0.5)
    expected = run_theirs(model, texts).logits
    with torch.inference_mode():
        assert far(net(**texts, where=where), expected[where]) <= 1e-5


def test_next_sentence() -> None:
    model = theirs("bert", "ForPreTraining")
    config = replace(
        config_from_huggingface(model.config.to_dict(), FAMILIES)[1], next_sentence=True
    )
    net, texts = BertMaskedLM(config).eval(), batch("bert")
    assert (
        load_weights(net, FAMILIES["bert"].weights_from_external(model.state_dict(), config), HEADS)
        == []
    )
    expected = run_theirs(model, texts)
    with torch.inference_mode():
        hidden = net.encoder(**texts)
        assert far(net.sentence_logits(hidden), expected.seq_relationship_logits) <= 1e-5
        assert (
            far(
                net.head(hidden)[texts["padding_mask"]],
                expected.prediction_logits[texts["padding_mask"]],
            )
            <= 1e-5
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("head", "kind"), [("ForSequenceClassification", BertClassifier), ("ForMaskedLM", BertMaskedLM)]
)
def test_base_shape(head: str, kind: type[nn.Module], family: str) -> None:
    vocabulary = VOCABULARY[family]
    options = {
        "vocab_size": vocabulary,
        "max_position_embeddings": 514 if family == "roberta" else 512,
    }
    model = theirs(family, head, BASE.get(family, {}), **options)
    net, texts = ours(family, model, kind), batch(family, (16,), vocabulary)
    stack = net.config.stack
    assert (stack.width, stack.depth, stack.heads, stack.resolved.mlp_width) == (768, 12, 12, 3072)
    assert net.encoder.embed.weight.shape == (vocabulary, 768)
    with torch.inference_mode():
        expected = run_theirs(model, texts).logits.flatten(0, -2)  # (1, K), or (1, N, V) -> (N, V)
        assert far(net(**texts), expected) <= 1e-4
    assert expected.std() > 0.01


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMaskedLM"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, head: str) -> None:
    model = theirs(family, head)
    net = ours(family, model, BertMaskedLM if head == "ForMaskedLM" else BertClassifier)
    back, state = (
        FAMILIES[family].weights_to_external(net.state_dict(), net.config),
        model.state_dict(),
    )
    assert back.keys() == {name for name in state if not name.endswith("_ids")}
    for name, value in back.items():
        first = FAMILIES[family].first_position(net.config) if "position" in name else 0
        assert torch.equal(value[first:], state[name][first:]), (
            name
        )  # RoBERTa never reads the rows before
    again = FAMILIES[family].weights_from_external(back, net.config)
    assert all(torch.equal(value, again[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_ours_becomes_theirs(family: str, tmp_path: Path) -> None:
    config = config_from_huggingface(
        theirs(family, "ForSequenceClassification").config.to_dict(), FAMILIES
    )[1]
    net, names = BertClassifier(config).eval(), ["bad", "fair", "good"]
    settings = FAMILIES[family].config_to_external(net.config, names)
    model = getattr(transformers, settings["architectures"][0])(
        getattr(transformers, f"{FAMILIES[family].architecture}Config").from_dict(settings)
    ).eval()
    model.load_state_dict(
        FAMILIES[family].weights_to_external(net.state_dict(), net.config), strict=False
    )
    model.save_pretrained(tmp_path)
    again = getattr(transformers, settings["architectures"][0]).from_pretrained(tmp_path)
    assert list(again.config.id2label.values()) == names
    texts = batch(family)
    with torch.inference_mode():
        assert far(net(**texts), run_theirs(again, texts).logits) <= 1e-5
    assert config_from_huggingface(again.config.to_dict(), FAMILIES) == (family, net.config)


def test_a_model_without_segments_becomes_bert() -> None:
    config = replace(
        config_from_huggingface(theirs("bert", "ForMaskedLM").config.to_dict(), FAMILIES)[1],
        segments=0,
    )
    net = BertMaskedLM(config).eval()
    settings = FAMILIES["bert"].config_to_external(config)
    model = transformers.BertForMaskedLM(transformers.BertConfig.from_dict(settings)).eval()
    model.load_state_dict(FAMILIES["bert"].weights_to_external(net.state_dict(), config))
    texts = {name: value for name, value in batch("bert").items() if name != "segments"}
    with torch.inference_mode():
        places = texts["padding_mask"]
        assert far(net(**texts, where=places), run_theirs(model, texts).logits[places]) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_bare_encoders_in_old_files(family: str) -> None:
    model = theirs(family, "Model")
    _, config = config_from_huggingface(model.config.to_dict(), FAMILIES)
    config = replace(config, num_classes=3)
    old = {
        name.replace("orm.weight", "orm.gamma").replace("orm.bias", "orm.beta"): value
        for name, value in model.state_dict().items()
    }
    assert not any(name.startswith(family) for name in old) and any("gamma" in name for name in old)
    net, texts = BertClassifier(config).eval(), batch(family)
    missing = load_weights(net, FAMILIES[family].weights_from_external(old, config), HEADS)
    heads = {"head.linear.weight", "head.linear.bias", "pooler.dense.weight", "pooler.dense.bias"}
    assert set(missing) == (
        heads - {"pooler.dense.weight", "pooler.dense.bias"} if family == "bert" else heads
    )
    with torch.inference_mode():
        expected = run_theirs(model, texts).last_hidden_state
        assert (
            far(net.encoder(**texts)[texts["padding_mask"]], expected[texts["padding_mask"]])
            <= 1e-5
        )


def test_another_number_of_classes_and_the_other_head() -> None:
    model = theirs("bert", "ForSequenceClassification")
    config = replace(config_from_huggingface(model.config.to_dict(), FAMILIES)[1], num_classes=7)
    state = FAMILIES["bert"].weights_from_external(model.state_dict(), config)
    assert load_weights(BertClassifier(config), state, HEADS) == [
        "head.linear.weight",
        "head.linear.bias",
    ]
    pretrained = BertMaskedLM(config)
    start = load_weights(pretrained, state, HEADS)
    assert start and all(name.startswith("head.") for name in start)
    missing = load_weights(BertClassifier(config), pretrained.state_dict(), HEADS)
    assert all(name.startswith(("head.", "pooler.")) for name in missing)


def test_presets_are_as_published() -> None:
    sizes = {
        "tiny": (128, 2, 2, 512),
        "mini": (256, 4, 4, 1024),
        "small": (512, 4, 8, 2048),
        "base": (768, 12, 12, 3072),
    }
    for name, (width, depth, heads, mlp_width) in sizes.items():
        config = replace(BERT_PRESETS[name], vocabulary=30522, num_classes=2)
        stack = config.stack
        assert (stack.width, stack.depth, stack.heads, stack.resolved.mlp_width) == (
            width,
            depth,
            heads,
            mlp_width,
        )
        with torch.device("meta"):
            model = transformers.BertForSequenceClassification(
                transformers.BertConfig.from_dict(
                    FAMILIES["bert"].config_to_external(config, ["no", "yes"])
                )
            )
            net = BertClassifier(config)
        assert sum(p.numel() for p in model.parameters()) == sum(
            p.numel() for p in net.parameters()
        )
    published = transformers.BertConfig(architectures=["BertForSequenceClassification"]).to_dict()
    assert config_from_huggingface(published, FAMILIES) == ("bert", config)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "gpt2"}, 'model_type "gpt2" is not supported'),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "mish"}, 'activation "mish"'),
        ({"is_decoder": True}, "is_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
    ],
)
def test_configs_that_we_lack_parts_for(change: dict[str, Any], words: str) -> None:
    settings = {**transformers.BertConfig().to_dict(), **change}
    with pytest.raises(ValueError, match=words):
        config_from_huggingface(settings, FAMILIES)


def test_what_does_not_fit_is_refused_by_name() -> None:
    model = theirs("bert", "ForMaskedLM")
    state, config = model.state_dict(), config_from_huggingface(model.config.to_dict(), FAMILIES)[1]
    with pytest.raises(ValueError, match="surprise"):
        FAMILIES["bert"].weights_from_external({**state, "surprise": torch.zeros(1)}, config)
    with pytest.raises(ValueError, match="encoder.stack.blocks.0.attention.qkv.weight"):
        FAMILIES["bert"].weights_from_external(
            {name: value for name, value in state.items() if ".self." not in name}, config
        )
    with pytest.raises(ValueError, match="tied"):
        FAMILIES["bert"].weights_from_external(
            {**state, "cls.predictions.decoder.weight": torch.zeros(60, 32)}, config
        )
    with pytest.raises(ValueError, match="position.table is .24, 32. .* but .9, 32."):
        FAMILIES["bert"].weights_from_external(state, replace(config, max_length=9))
    with pytest.raises(ValueError, match="encoder.embed.weight is"):
        load_weights(
            BertMaskedLM(replace(config, vocabulary=70)),
            FAMILIES["bert"].weights_from_external(state, config),
        )
    classifier = replace(config, num_classes=2)
    for option, value in {
        "pool": "mean",
        "pooler": "relu",
        "position": "rotary",
        "embedding_norm": False,
    }.items():
        with pytest.raises(ValueError, match=option):
            other = replace(classifier, **{option: value})
            FAMILIES["bert"].weights_to_external(BertClassifier(other).state_dict(), other)
    for option, value in {
        "order": "pre",
        "norm": "rmsnorm",
        "bias": False,
        "feedforward": "swiglu",
    }.items():
        with pytest.raises(ValueError, match=option):
            FAMILIES["bert"].config_to_external(
                replace(config, stack=replace(config.stack, **{option: value}))
            )
    with pytest.raises(ValueError, match="feedforward gelu, but this one has relu"):
        FAMILIES["roberta"].config_to_external(
            replace(config, stack=replace(config.stack, feedforward="relu"))
        )
    with pytest.raises(ValueError, match="segments 0"):
        FAMILIES["distilbert"].config_to_external(
            replace(config, stack=replace(config.stack, norm_eps=1e-12))
        )
    with pytest.raises(ValueError, match="sentence"):
        both = replace(classifier, next_sentence=True, segments=2)
        FAMILIES["roberta"].weights_to_external(BertMaskedLM(both).state_dict(), both)


def test_roberta_counts_positions_behind_padding() -> None:
    _, config = config_from_huggingface(theirs("roberta", "Model").config.to_dict(), FAMILIES)
    assert config.max_length == 22 and isinstance(config, BertConfig)
