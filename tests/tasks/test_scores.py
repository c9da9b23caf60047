"""Scores of translations: those of sacrebleu on raw texts, whatever the batches and the ranks."""

from collections.abc import Sequence

import pytest
import torch
from sacrebleu import corpus_bleu, corpus_chrf

from tasks.seq2seq.scores import ScoredTranslation, TranslationScores, table

PAIRS = [
    ScoredTranslation(
        0, "A dog.", "Der Hund läuft über die Straße .", "Der Hund rennt über die Straße.", True
    ),
    ScoredTranslation(
        1,
        "Two men",
        "Zwei Männer\tsitzen auf einer Bank",
        "Zwei Männer sitzen  auf einer Bank",
        False,
    ),
    ScoredTranslation(2, "A child", "", "Ein Kind spielt im Sand.", True),
    ScoredTranslation(3, 'A\t"house"', 'Ein "Haus"\nam See\u2028!', 'Ein "Haus" am See!', True),
]


def scored(
    batches: Sequence[Sequence[ScoredTranslation]], language: str = "de"
) -> TranslationScores:
    metric = TranslationScores(language)
    for batch in batches:
        outputs = {
            "texts": [row.text for row in batch],
            "finished": [row.finished for row in batch],
        }
        names = {"index": "number", "sources": "source", "references": "reference"}
        metric.update(
            outputs, {name: [getattr(row, own) for row in batch] for name, own in names.items()}
        )
    return metric


def test_scores_are_those_of_sacrebleu() -> None:
    metric = scored([[PAIRS[2], PAIRS[0]], [], [PAIRS[3], PAIRS[1]]])
    found = metric.compute()
    assert metric.found == PAIRS and metric.unfinished == 1  # in the order of the data
    texts, references = [row.text for row in PAIRS], [[row.reference for row in PAIRS]]
    assert 1 < float(found["bleu"]) == pytest.approx(corpus_bleu(texts, references).score)
    assert 1 < float(found["chrf"]) == pytest.approx(corpus_chrf(texts, references).score)
    assert float(found["exact"]) == 0.25  # but for space
    assert all(value.ndim == 0 for value in found.values())


def test_ranks_put_together_count_as_one() -> None:
    """What torchmetrics makes of a state that is concatenated over ranks, one of which saw nothing."""
    whole, parts = scored([PAIRS]).compute(), [scored([PAIRS[:1]]), scored([]), scored([PAIRS[1:]])]
    together = TranslationScores("de")
    together.texts = torch.cat([torch.cat(part.texts) for part in parts])  # type: ignore[assignment]
    assert together.compute() == whole


def test_it_starts_anew() -> None:
    metric = scored([PAIRS])
    metric.compute()
    metric.reset()
    assert {name: float(value) for name, value in metric.compute().items()} == {
        "bleu": 0,
        "chrf": 0,
        "exact": 0,
    }


@pytest.mark.parametrize(
    "language, cut", [("de", "13a"), ("zh", "zh"), ("zh-Hant", "zh"), ("ja", "char")]
)
def test_signatures_say_how(language: str, cut: str) -> None:
    signatures = TranslationScores(language).signatures()
    assert signatures["bleu_signature"].startswith(
        f"nrefs:1|case:mixed|eff:no|tok:{cut}|smooth:exp|version:"
    )
    assert signatures["chrf_signature"].startswith(
        "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:"
    )


def test_the_table_has_a_line_for_each() -> None:
    lines = table(PAIRS).splitlines()
    assert lines[0] == "index\tsource\ttranslation\treference\tfinished" and len(lines) == 1 + len(
        PAIRS
    )
    assert lines[4] == '3\tA "house"\tEin "Haus" am See !\tEin "Haus" am See!\tyes' and lines[
        2
    ].endswith("\tno")
