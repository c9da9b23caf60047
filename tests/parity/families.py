"""Tiny models of transformers, a table of all families, and what both sides compute."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.seq2seq import Seq2Seq
from modules.pretrained import bert, decoder, seq2seq
from modules.pretrained.family import TransformersFamily, config_from_huggingface
from modules.pretrained.weights import load_weights

Settings = dict[str, Any]
DECODER_FAMILIES = {**decoder.FAMILIES, **decoder.IMAGE_FAMILIES}
FAMILIES: dict[str, TransformersFamily[Any]] = {
    **bert.FAMILIES,
    **DECODER_FAMILIES,
    **seq2seq.FAMILIES,
}
VOCABULARY = 61
EOS = 1  # of encoder-decoders
ENCODER: Settings = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "num_labels": 3,
    "pad_token_id": 0,
}
DISTILBERT: Settings = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 48,
    "num_labels": 3,
    "pad_token_id": 0,
}
ROBERTA: Settings = {**ENCODER, "pad_token_id": 1}
ENDLESS: Settings = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
GPT2: Settings = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, **ENDLESS}
IMAGEGPT: Settings = {**GPT2, "activation_function": "quick_gelu"}
ROTARY: Settings = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    **ENDLESS,
}
LLAMA3: Settings = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR: Settings = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
SPECIAL: Settings = {
    "pad_token_id": 0,
    "eos_token_id": EOS,
    "bos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
BART: Settings = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    **SPECIAL,
}
MARIAN: Settings = {**BART, "scale_embedding": True, "activation_function": "swish"}
TWO_VOCABULARIES: Settings = {
    **MARIAN,
    "share_encoder_decoder_embeddings": False,
    "decoder_vocab_size": 53,
}
T5: Settings = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    **SPECIAL,
}


@dataclass(frozen=True)
class Case:
    """A class of transformers and the options of its config."""

    architecture: str
    settings: Settings

    @property
    def kind(self) -> Any:
        return getattr(transformers, self.architecture)

    @property
    def family(self) -> str:
        return self.kind.config_class.model_type

    def config(self, **changes: Any) -> Any:
        """Their config, with some options changed."""
        given = {"vocab_size": VOCABULARY, **self.settings, **changes}
        return self.kind.config_class(**given, architectures=[self.architecture])

    def written(self, **changes: Any) -> Settings:
        """The content of their config.json, with some entries changed."""
        return self.config().to_dict() | changes

    def ours(self) -> Any:
        """Our config of the same model."""
        return config_from_huggingface(self.written(), FAMILIES)[1]

    def build(self, **changes: Any) -> Any:
        """Their model with random weights."""
        return randomise(self.kind(self.config(**changes)).eval())


MODELS = {  # one for each class
    "BertForMaskedLM": ENCODER,
    "BertForSequenceClassification": ENCODER,
    "DistilBertForMaskedLM": DISTILBERT,
    "DistilBertForSequenceClassification": DISTILBERT,
    "RobertaForMaskedLM": ROBERTA,
    "RobertaForSequenceClassification": ROBERTA,
    "GPT2LMHeadModel": GPT2,
    "ImageGPTForCausalImageModeling": IMAGEGPT,
    "LlamaForCausalLM": ROTARY,
    "MistralForCausalLM": {**ROTARY, "head_dim": 20, "sliding_window": 96},
    "Qwen2ForCausalLM": {**ROTARY, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {**ROTARY, "head_dim": 16, "tie_word_embeddings": True},
    "MarianMTModel": MARIAN,
    "BartForConditionalGeneration": BART,
    "T5ForConditionalGeneration": T5,
}
VARIANTS = {  # our network -> its variants: class of theirs, options that differ
    "gpt2 untied": (
        "GPT2LMHeadModel",
        {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "relu"},
    ),
    "llama3 scaling, tied": (
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "linear scaling": ("LlamaForCausalLM", {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "llama, biases in attention": ("LlamaForCausalLM", {"attention_bias": True}),
    "llama, biases after attention": (
        "LlamaForCausalLM",
        {"mlp_bias": True, "hidden_act": "gelu", "head_dim": 8},
    ),
    "qwen3 with biases": (
        "Qwen3ForCausalLM",
        {"head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-5},
    ),
    "marian of odd width": (
        "MarianMTModel",
        {"d_model": 45, "encoder_attention_heads": 3, "decoder_attention_heads": 5},
    ),
    "marian, two vocabularies": ("MarianMTModel", TWO_VOCABULARIES),
    "marian, three tables": ("MarianMTModel", {**TWO_VOCABULARIES, "tie_word_embeddings": False}),
    "bart, scaled": (
        "BartForConditionalGeneration",
        {"scale_embedding": True, "activation_function": "relu"},
    ),
    "t5 v1.1": (
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_heads": 3},
    ),
    "t5 with silu": (
        "T5ForConditionalGeneration",
        {"feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-5},
    ),
}
PLAIN = ("LlamaForCausalLM", "BertForMaskedLM", "MarianMTModel")  # others: slow
CASES = {name: Case(name, settings) for name, settings in MODELS.items()}
CASES |= {name: Case(kind, {**MODELS[kind], **more}) for name, (kind, more) in VARIANTS.items()}
DECODERS = [case for case in CASES.values() if case.family in DECODER_FAMILIES]
SEQ2SEQ = [case for case in CASES.values() if case.family in seq2seq.FAMILIES]


def randomise(model: Any, std: float = 0.2) -> Any:
    """Gives a model weights among which no zeros or ones hide a mistake."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            sinusoids = "embed_positions" in name and "Marian" in type(model).__name__
            if not value.is_floating_point() or sinusoids or "inv_freq" in name:
                continue
            value.normal_(std=std)
            if name.endswith("weight") and ("norm" in name.lower() or ".ln_" in name):
                value += 1.0
    return model


def network(architecture: str, config: Any) -> Any:
    """Our network in the place of one of theirs."""
    kind: Any = Seq2Seq
    if isinstance(config, BertConfig):
        kind = BertClassifier if "Classification" in architecture else BertMaskedLM
        config = replace(config, next_sentence="PreTraining" in architecture)
    if isinstance(config, DecoderConfig):
        kind = Decoder
    return kind(config).eval()


def ours(model: Any) -> Any:
    """Our network with the weights of theirs."""
    family, config = config_from_huggingface(model.config.to_dict(), FAMILIES)
    net = network(type(model).__name__, config)
    state = FAMILIES[family].weights_from_external(model.state_dict(), net.config)
    assert load_weights(net, state, FAMILIES[family].optional) == []
    return net


def to_external(family: str, net: Any, special_tokens: Any = None) -> Settings:
    """The content of the config.json of our network."""
    more = special_tokens
    if isinstance(net.config, BertConfig):
        more = None
        if isinstance(net, BertClassifier):
            more = [f"class {i}" for i in range(net.config.num_classes or 0)]
    return FAMILIES[family].config_to_external(net.config, more)


def texts(config: Any, lengths: tuple[int, ...] = (29, 11, 20), left: bool = False) -> Any:
    """Random input of a model of theirs, padded on the right or on the left."""
    positions = torch.arange(max(lengths))[None]
    sizes = torch.tensor(lengths)[:, None]
    mask = positions >= max(lengths) - sizes if left else positions < sizes  # (B, N)
    tokens = torch.randint(3, 50, mask.shape).masked_fill(~mask, config.pad_token_id)
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    if config.model_type == "bert":
        inputs["token_type_ids"] = (positions > 3).long().expand_as(tokens)
    if config.model_type in DECODER_FAMILIES:
        inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    if config.model_type in seq2seq.FAMILIES:
        target = torch.randint(3, 50, (len(lengths), 30))
        inputs["decoder_input_ids"] = target.index_fill(1, torch.tensor(0), 0)
    return inputs


def their_logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Their logits, without those of padding."""
    with torch.inference_mode():
        logits = model(**inputs).logits
    is_source = logits.dim() == 3 and "decoder_input_ids" not in inputs
    return logits[inputs["attention_mask"].bool()] if is_source else logits


def our_logits(net: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The same of our network."""
    tokens = inputs["input_ids"]
    mask = inputs["attention_mask"].bool()
    segments = inputs.get("token_type_ids")
    with torch.inference_mode():
        if isinstance(net, BertClassifier):
            return net(tokens, mask, segments)
        if isinstance(net, BertMaskedLM):
            return net(tokens, mask, segments, where=mask)
        if isinstance(net, Decoder):
            return net.logits(net(tokens, mask))[mask]
        assert isinstance(net, Seq2Seq)
        return net.logits(net(tokens, inputs["decoder_input_ids"], mask))


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value: float32 rounds in proportion."""
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()
