"""Greedy decoding and beam search give the tokens and scores of transformers."""

from typing import Any

import pytest
import torch

from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from modules.models.seq2seq import Seq2Seq
from tests.parity.families import CASES, DECODERS, EOS, SEQ2SEQ, Case, ours, texts


@pytest.mark.parametrize("case", DECODERS, ids=lambda case: case.family)
def test_greedy_decoding_with_a_cache(case: Case) -> None:
    model = case.build(initializer_range=0.3)
    inputs = texts(model.config, (17, 5, 30), left=True)
    tokens = inputs["input_ids"]
    mask = inputs["attention_mask"]
    with torch.inference_mode():
        found = model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=64)
    prompts = [row[kept].tolist() for row, kept in zip(tokens, mask.bool(), strict=True)]
    steps = generate(ours(model), prompts, GenerationConfig(64, temperature=0))
    assert torch.equal(torch.stack(list(steps), 1), found[:, tokens.shape[1] :])
    assert len(found.unique()) > 10


def assert_same_translations(
    model: Any,
    net: Seq2Seq,
    beams: int = 1,
    penalty: float = 1.0,
    stopping: Any = "likely",
    new: int = 16,
) -> None:
    """Compares all hypotheses of their `generate` and our `translate`, and their scores."""
    inputs = texts(model.config, (19, 5, 9, 13))
    rows = [
        row[kept.bool()].tolist()
        for row, kept in zip(inputs["input_ids"], inputs.pop("attention_mask"), strict=True)
    ]
    options: Any = {"num_beams": beams, "num_return_sequences": beams, "max_new_tokens": new}
    if beams > 1:
        options |= {"length_penalty": penalty, "output_scores": True}
        options["early_stopping"] = {"likely": False, "first": True}.get(stopping, stopping)
    with torch.inference_mode():
        found = model.generate(
            inputs["input_ids"],
            attention_mask=(inputs["input_ids"] != 0).long(),
            do_sample=False,
            return_dict_in_generate=True,
            **options,
        )
    config = GenerationConfig(
        new, temperature=0, beams=beams, length_penalty=penalty, early_stopping=stopping
    )
    got = [text for some in translate(net, rows, config, 0, [EOS]) for text in some]
    for number, (text, expected) in enumerate(
        zip(got, found.sequences[:, 1:].tolist(), strict=True)
    ):
        length = expected.index(EOS) + 1 if EOS in expected else len(expected)
        assert (text.tokens, text.finished) == (expected[:length], EOS in expected)
        if beams > 1:
            score = found.sequences_scores[number].item()
            assert text.score == pytest.approx(score, rel=1e-4, abs=1e-4)
    assert beams == 1 or any(text.finished for text in got)


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("case", SEQ2SEQ, ids=[n for n, c in CASES.items() if c in SEQ2SEQ])
def test_greedy_decoding_and_beam_search(case: Case) -> None:
    # The cache of T5 wants both sides equally deep.
    model = case.build(**({"num_decoder_layers": 2} if case.family == "t5" else {}))
    with torch.no_grad():  # so that some texts end
        if case.family == "t5":
            model.get_output_embeddings().weight[EOS] *= 3
        else:
            model.final_logits_bias[:, EOS] += 6 if model.config.scale_embedding else 3
    net = ours(model)
    assert_same_translations(model, net, new=40)
    for penalty, stopping in ((0.6, "likely"), (2.0, "likely"), (0.0, "first"), (2.0, "never")):
        assert_same_translations(model, net, 5, penalty, stopping)
