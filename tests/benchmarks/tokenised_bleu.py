"""BLEU of tokenised, lowercased texts, as papers on Multi30k give it, beside that of raw texts.

    python -m tests.benchmarks.tokenised_bleu RUN_DIR/translations.tsv [--language de]

The words are those of Moses' tokenizer (sacremoses), of translations and references alike. Such
figures are higher than those of raw texts, and depend on the tokenizer: compare them only with
figures of the same kind.
"""

import csv

from sacrebleu.metrics import BLEU
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from tests.benchmarks import _compare


def main() -> None:
    """Prints both figures with their signatures."""
    parser = _compare.arguments(__doc__)
    parser.add_argument("file", help="translations.tsv of a run")
    parser.add_argument("--language", default="de", help="of the translations")
    options = parser.parse_args()
    with open(options.file, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    texts = {name: [row[name] for row in rows] for name in ("translation", "reference")}
    normalizer = MosesPunctNormalizer(options.language)
    tokenizer = MosesTokenizer(options.language)

    def words(text: str) -> str:
        plain = normalizer.normalize(text).lower()
        return str(tokenizer.tokenize(plain, return_str=True, escape=False))

    tokenised = {name: [words(text) for text in column] for name, column in texts.items()}
    for kind, columns, bleu in (
        ("raw", texts, BLEU()),
        ("tokenised", tokenised, BLEU(tokenize="none", force=True)),
    ):
        score = bleu.corpus_score(columns["translation"], [columns["reference"]]).score
        print(f"{kind:<11}{score:.2f}  {bleu.get_signature()}")


if __name__ == "__main__":
    main()
