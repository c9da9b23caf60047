"""BLEU of tokenised, lowercased texts, as papers on Multi30k give it, beside sacreBLEU's own of raw texts.

    python -m tests.benchmarks.tokenised_bleu RUN_DIR/translations.tsv [--language de]

The words are those of Moses' tokenizer (sacremoses), of translations and references alike. Such figures are higher than
those of raw texts, and depend on the tokenizer: compare them only with figures of the same kind.
"""

import argparse
import csv

from sacrebleu.metrics import BLEU
from sacremoses import MosesPunctNormalizer, MosesTokenizer


def main() -> None:
    """Parses the command line and prints both figures with their signatures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="translations.tsv of a run")
    parser.add_argument("--language", default="de", help="of the translations")
    options = parser.parse_args()
    with open(options.file, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    made, asked = ([row[name] for row in rows] for name in ("translation", "reference"))
    normalizer, tokenizer = MosesPunctNormalizer(options.language), MosesTokenizer(options.language)

    def words(text: str) -> str:
        return str(
            tokenizer.tokenize(normalizer.normalize(text).lower(), return_str=True, escape=False)
        )

    raw, parted = BLEU(), BLEU(tokenize="none", force=True)
    print(f"raw        {raw.corpus_score(made, [asked]).score:.2f}  {raw.get_signature()}")
    score = parted.corpus_score([*map(words, made)], [[*map(words, asked)]]).score
    print(f"tokenised  {score:.2f}  {parted.get_signature()}")


if __name__ == "__main__":
    main()
