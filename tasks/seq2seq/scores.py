"""Metrics of translations: BLEU and chrF of sacrebleu, and exact matches."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sacrebleu.metrics import BLEU, CHRF
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from tasks.cli.text_io import single_line

# Tokenizers of BLEU by ISO 639 code or name, for languages whose words have no spaces between them,
# and Korean; 13a for all others.
BLEU_TOKENIZERS = {
    **dict.fromkeys(["zh", "zho", "cmn", "yue", "chinese"], "zh"),
    **dict.fromkeys(["ja", "jpn", "japanese", "ko", "kor", "korean", "th", "tha", "thai"], "char"),
    **dict.fromkeys(["lo", "lao", "km", "khm", "my", "mya", "bo", "bod"], "char"),
}


class ScoredTranslation(NamedTuple):
    """A translation with its number in the data; `finished`: before the length limit."""

    number: int
    source: str
    text: str
    reference: str
    finished: bool


class TranslationScores(Metric):
    """BLEU (Papineni 2002), chrF (Popović 2015) and exact matches of raw texts.

    BLEU and chrF are sacrebleu's (Post 2018), from 0 to 100; `signatures` has its options.

    Args:
        language: Of the translations, such as "de", "zh-CN" or "zho_Hans".
        lowercase: Compare lowercased texts.

    Attributes:
        found: Translations of the last `compute`, in the order of the data.
    """

    full_state_update = False
    names = ("bleu", "chrf", "exact")
    texts: list[Tensor]

    def __init__(self, language: str, lowercase: bool = False) -> None:
        super().__init__()
        code = re.split("[-_]", language.lower())[0]
        self.lowercase = lowercase
        self.bleu = BLEU(lowercase, tokenize=BLEU_TOKENIZERS.get(code, "13a"))
        self.chrf = CHRF(lowercase=lowercase)
        self.add_state("texts", [], dist_reduce_fx="cat")  # uint8 (bytes,): JSON, a line each
        self.found: list[ScoredTranslation] = []
        self.reset()

    def reset(self) -> None:
        """Removes all texts; an empty one stays, so that ranks without any can be gathered."""
        super().reset()
        self.texts.append(torch.zeros(0, dtype=torch.uint8, device=self.device))

    def update(self, outputs: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
        rows = zip(
            targets["index"],
            targets["sources"],
            outputs["texts"],
            targets["references"],
            outputs["finished"],
            strict=True,
        )
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        content = torch.tensor(list(lines.encode()), dtype=torch.uint8)
        self.texts.append(content.to(self.device))

    def compute(self) -> dict[str, Tensor]:
        lines = dim_zero_cat(self.texts).cpu().numpy().tobytes().decode().splitlines()
        self.found = sorted(ScoredTranslation(*json.loads(line)) for line in lines)
        scores = dict.fromkeys(self.names, 0.0)
        if self.found:
            texts = [row.text for row in self.found]
            references = [row.reference for row in self.found]
            scores["bleu"] = self.bleu.corpus_score(texts, [references]).score
            scores["chrf"] = self.chrf.corpus_score(texts, [references]).score
            pairs = zip(map(self.words, texts), map(self.words, references), strict=True)
            scores["exact"] = sum(text == reference for text, reference in pairs) / len(texts)
        return {name: torch.tensor(score) for name, score in scores.items()}

    def words(self, text: str) -> list[str]:
        """What exact matches compare of a text."""
        return (text.lower() if self.lowercase else text).split()

    @property
    def unfinished(self) -> int:
        """Number of translations that did not end before the length limit."""
        return sum(not row.finished for row in self.found)

    def signatures(self) -> dict[str, str]:
        for metric in (self.bleu, self.chrf):
            metric.corpus_score(["a"], [["a"]])  # tells it the number of references
        return {
            "bleu_signature": str(self.bleu.get_signature()),
            "chrf_signature": str(self.chrf.get_signature()),
        }


def table(rows: Sequence[ScoredTranslation]) -> str:
    """Returns translations as tab-separated values."""
    lines = ["index\tsource\ttranslation\treference\tfinished"]
    for row in rows:
        texts = map(single_line, (row.source, row.text, row.reference))
        lines.append("\t".join([str(row.number), *texts, "yes" if row.finished else "no"]))
    return "\n".join(lines) + "\n"
