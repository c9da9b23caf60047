"""How good translations are: BLEU and chrF of sacrebleu, and exact matches."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sacrebleu.metrics import BLEU, CHRF
from torch import Tensor
from torchmetrics import Metric

from tasks.cli.text_io import single_line

# Tokenizers of BLEU for languages without spaces between words; others: 13a.
BLEU_TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char"}


class ScoredTranslation(NamedTuple):
    """A translation, its number in the data, source, reference, and whether it ended."""

    number: int
    source: str
    text: str
    reference: str
    finished: bool


class TranslationScores(Metric):
    """BLEU (Papineni 2002), chrF (Popović 2015) and exact matches of raw, cased texts.

    BLEU and chrF are those of sacrebleu (Post 2018), from 0 to 100; `signatures` says with which of
    its options.

    Args:
        language: Of the translations, such as "de".

    Attributes:
        found: Translations of the latest `compute`, in the order of the data.
    """

    full_state_update = False
    names = ("bleu", "chrf", "exact")
    texts: list[Tensor]

    def __init__(self, language: str) -> None:
        super().__init__()
        self.bleu = BLEU(tokenize=BLEU_TOKENIZERS.get(language.partition("-")[0], "13a"))
        self.chrf = CHRF()
        self.add_state("texts", [], dist_reduce_fx="cat")  # uint8 (bytes,): JSON, a line each
        self.found: list[ScoredTranslation] = []
        self.reset()

    def reset(self) -> None:
        """Removes all texts; an empty tensor stays, so that ranks without any can take part."""
        super().reset()
        self.texts.append(torch.zeros(0, dtype=torch.uint8, device=self.device))

    def update(self, outputs: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
        """Adds the `texts` of a batch with their `index`, sources and references."""
        sides = targets["sources"], outputs["texts"], targets["references"], outputs["finished"]
        rows = zip(targets["index"], *sides, strict=True)
        lines = "".join(json.dumps([int(index), *row]) + "\n" for index, *row in rows)
        if lines:
            self.texts.append(
                torch.frombuffer(bytearray(lines.encode()), dtype=torch.uint8).to(self.device)
            )

    def compute(self) -> dict[str, Tensor]:
        """Returns the scores by name."""
        texts: Any = self.texts  # one tensor where ranks were put together
        whole = texts if isinstance(texts, Tensor) else torch.cat(texts)
        lines = whole.cpu().numpy().tobytes().decode().splitlines()
        self.found = sorted(ScoredTranslation(*json.loads(line)) for line in lines)
        return {name: torch.tensor(value) for name, value in self.scores().items()}

    def scores(self) -> dict[str, float]:
        """Returns the scores of `found`."""
        if not self.found:
            return {"bleu": 0.0, "chrf": 0.0, "exact": 0.0}
        texts = [row.text for row in self.found]
        references = [row.reference for row in self.found]
        return {
            "bleu": self.bleu.corpus_score(texts, [references]).score,
            "chrf": self.chrf.corpus_score(texts, [references]).score,
            "exact": sum(map(equal_text, texts, references)) / len(texts),
        }

    @property
    def unfinished(self) -> int:
        """Number of translations that did not end before the length limit."""
        return sum(not row.finished for row in self.found)

    def signatures(self) -> dict[str, str]:
        """Returns the options of sacrebleu, the number of references included."""
        for metric in (self.bleu, self.chrf):
            metric.corpus_score(["a"], [["a"]])  # the signature has that number only then
        return {
            "bleu_signature": str(self.bleu.get_signature()),
            "chrf_signature": str(self.chrf.get_signature()),
        }


def equal_text(text: str, reference: str) -> bool:
    """Tells whether two texts are equal except for white space."""
    return text.split() == reference.split()


def table(rows: Sequence[ScoredTranslation]) -> str:
    """Returns translations as tab-separated values, a line each."""
    lines = [
        ("index", "source", "translation", "reference", "finished"),
        *(
            (str(index), *map(single_line, texts), "yes" if ended else "no")
            for index, *texts, ended in rows
        ),
    ]
    return "".join("\t".join(line) + "\n" for line in lines)
