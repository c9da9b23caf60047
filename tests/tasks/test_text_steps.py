"""What a step of the text tasks computes: smoothed labels, what pairs mean, and masks by seed and epoch."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from datamodules.tokenizers import Tokenizer
from datamodules.tokens.masking import MaskConfig, Masker
from modules.models.bert import BERT_PRESETS, BertClassifier
from tasks.bert.task import BertTask
from tasks.mlm.task import MaskedLMTask
from tests.parity.families import CASES, Case, ours, randomise, texts
from tests.tasks.command import checkpoint, run, write_reviews

Drawn = list[
    tuple[Tensor, Tensor, Tensor]
]  # of each training step: tokens, what became of them, and where


@pytest.mark.parametrize("r_drop", [0.0, 2.0])
def test_labels_are_smoothed_in_training_only(r_drop: float) -> None:
    task, labels = BertTask(label_smoothing=0.2, r_drop=r_drop), torch.tensor([0, 2, 1])
    config = replace(BERT_PRESETS["tiny"], vocabulary=61, num_classes=3)
    task.net = randomise(BertClassifier(config).eval())  # without dropout
    inputs = texts(CASES["BertForMaskedLM"].config())
    batch = {"tokens": inputs["input_ids"], "padding_mask": inputs["attention_mask"].bool()}
    batch["label"] = labels
    scores = task.net(batch["tokens"], batch["padding_mask"]).log_softmax(-1)
    right = scores[torch.arange(3), labels]
    training, evaluation = (task.step(batch, training=flag)[0] for flag in (True, False))
    torch.testing.assert_close(training, -(0.8 * right + 0.2 * scores.mean(1)).mean())
    torch.testing.assert_close(evaluation, -right.mean())
    assert abs(training - evaluation) > 1e-3


def test_a_pair_that_belongs_together_has_label_0_as_in_hugging_face() -> None:
    import transformers

    model = Case("BertForPreTraining", CASES["BertForMaskedLM"].settings).build()
    judge = transformers.BertForNextSentencePrediction(model.config).eval()
    judge.load_state_dict(model.state_dict(), strict=False)
    inputs = texts(model.config)
    task = MaskedLMTask()
    task.net = ours(model)
    task.masker = lambda tokens, keep, seeds: (tokens, keep)  # type: ignore[assignment]
    expected = judge(**inputs, labels=torch.tensor([0, 1, 0]))
    pairs = {
        "tokens": inputs["input_ids"],
        "padding_mask": inputs["attention_mask"].bool(),
        "segments": inputs["token_type_ids"],
    }
    pairs |= {"index": torch.arange(3), "is_next": torch.tensor([1, 0, 1])}
    loss, figures, counts = task.step(pairs, training=False)
    torch.testing.assert_close(loss - figures["token_loss"], expected.loss, atol=1e-5, rtol=0)
    guesses = expected.logits.argmax(1)
    assert (
        counts["next_acc"] == 3
        and figures["next_acc"] == (guesses == torch.tensor([0, 1, 0])).float().mean()
    )
    other = judge(**inputs, labels=torch.tensor([1, 0, 1])).loss
    assert abs(other - expected.loss) > 1e-3  # the meaning shows


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What is masked in training from now on."""
    steps: Drawn = []
    mask = Masker.__call__

    def keep(
        self: Masker, tokens: Tensor, keep: Tensor, seeds: list[int] | None
    ) -> tuple[Tensor, Tensor]:
        masked, where = mask(self, tokens, keep, seeds)
        if torch.is_grad_enabled():
            steps.append((tokens, masked, where))
        return masked, where

    monkeypatch.setattr(Masker, "__call__", keep)
    return steps


def pretrain(options: str) -> None:
    """Two epochs of the same two batches of texts, in words of many pieces."""
    if not Path("hub").exists():
        write_reviews(Path("hub"))
    line = "fit --preset tiny --data.source hub --data.path hub --data.max_length 48 --data.batch_size 8"
    line += " --data.tokenizer.vocabulary 70 --trainer.overfit_batches 2 --trainer.max_epochs 2"
    assert run(f"{line} {options}", "mlm") == 0


def partly_masked(steps: Drawn, starts: list[bool]) -> int:
    """Words of which some pieces were masked and others not."""
    found = 0
    for tokens, _, where in steps:
        for row, chosen in zip(tokens.tolist(), where.tolist(), strict=True):
            words: list[set[bool]] = []
            for token, hidden in zip(row, chosen, strict=True):
                if starts[token]:
                    words.append(set())
                words[-1].add(hidden)
            found += sum(len(word) > 1 for word in words)
    return found


def test_masks_follow_from_seed_epoch_and_batch(drawn: Drawn) -> None:
    pretrain("--run_dir a")
    first = list(drawn)
    pretrain("--run_dir b")
    again = drawn[len(first) :]
    assert len(first) == len(again) == 4
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    for number in (0, 1):
        (tokens, _, before), (same, _, after) = first[number], first[2 + number]
        assert torch.equal(tokens, same) and not torch.equal(before, after)
    assert partly_masked(first, Tokenizer.from_file("a/tokenizer.json").starts_word) > 0


def test_how_tokens_are_masked(drawn: Drawn) -> None:
    assert asdict(MaskConfig()) == {
        "share": 0.15,
        "mask": 0.8,
        "random": 0.1,
        "whole_words": False,
    }  # Devlin 2019
    pretrain(
        "--model.mask.whole_words true --model.mask.share 0.3 --model.mask.mask 1 --model.mask.random 0 --run_dir r"
    )
    assert checkpoint("r")["tessera"]["config"]["model"]["mask"]["whole_words"] is True
    tokenizer = Tokenizer.from_file("r/tokenizer.json")
    assert partly_masked(drawn, tokenizer.starts_word) == 0
    assert sum(int(where.sum()) for *_, where in drawn) > 0
    assert all((masked[where] == tokenizer.special_ids.mask).all() for _, masked, where in drawn)
