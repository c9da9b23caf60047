"""Data diversification (Nguyen 2020): synthetic pairs by forward and back-translation.

    python -m configs.examples.data_diversification FORWARD BACKWARD FOLDER OUTPUT

FORWARD and BACKWARD are run folders of `python -m tasks.seq2seq fit`, the second with the languages
of the first swapped. FOLDER has aligned files such as train.en and train.de, also as .gz. FORWARD
translates the sources of the training pairs, and BACKWARD their targets. OUTPUT gets the training
pairs, the sources with their translations, and the translations of the targets with these, each
pair once. It also gets the files of FOLDER for validation and test. All steps for Multi30k, of
which the first two can run at the same time:

    export TESSERA_DATA=FOLDER_ABOVE_MULTI30K
    python -m tasks.seq2seq fit --config configs/seq2seq/multi30k_cpu.yaml \
        --trainer.max_epochs 14 --model.average 4 --run_dir runs/forward
    python -m tasks.seq2seq fit --config configs/seq2seq/multi30k_cpu.yaml \
        --trainer.max_epochs 14 --model.average 4 --run_dir runs/backward --data.languages de-en
    python -m configs.examples.data_diversification runs/forward runs/backward \
        $TESSERA_DATA/multi30k runs/more_pairs
    python -m tasks.seq2seq fit --config configs/seq2seq/multi30k_cpu.yaml \
        --data.path runs/more_pairs --trainer.max_epochs 14 --run_dir runs/student

`configs/README.md` has the minutes and BLEU of these runs.
"""

import shutil
import sys
from pathlib import Path

import tessera

from datamodules.sources import AlignedFiles, ParallelOptions


def load(run: str) -> tessera.Translator:
    """The translator of a run folder."""
    model = tessera.load(run)
    if not isinstance(model, tessera.Translator):
        sys.exit(f"error: {run} is not a translator: give a run folder of tasks.seq2seq")
    return model


def translate(model: tessera.Translator, texts: list[str]) -> list[str]:
    """One translation of each text by beam search, on one line."""
    source, target = model.metadata["languages"]
    print(f"translating {len(texts):,} texts from {source} to {target}", flush=True)
    return [" ".join(text.splitlines()) for text in model.translate(texts, batch_size=128)]


def main(forward: str, backward: str, folder: Path, output: Path) -> None:
    if output.exists():
        sys.exit(f"error: {output} exists: give another OUTPUT")
    models = [load(forward), load(backward)]
    languages = models[0].metadata["languages"]
    if models[1].metadata["languages"] != languages[::-1]:
        sys.exit(f"error: BACKWARD must translate from {languages[1]} to {languages[0]}")
    given = AlignedFiles(str(folder), ParallelOptions(), languages).split("train")
    sources, targets = (column.to_pylist() for column in given.columns)
    real = [*zip(sources, targets, strict=True)]
    pairs = [
        *real,
        *zip(sources, translate(models[0], sources), strict=True),
        *zip(translate(models[1], targets), targets, strict=True),
    ]
    unique = [*dict.fromkeys(pairs)]  # in their order
    files = [path for path in folder.iterdir() if path.is_file() and "train" not in path.name]
    output.mkdir(parents=True)
    for file in files:
        shutil.copy(file, output)
    for language, texts in zip(languages, zip(*unique, strict=True), strict=True):
        lines = "".join(f"{text}\n" for text in texts)
        (output / f"train.{language}").write_text(lines, encoding="utf-8")
    added = len(unique) - len({*real})
    print(f"{len(unique):,} training pairs are in {output}, {added:,} of them synthetic")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("error: give FORWARD, BACKWARD, FOLDER and OUTPUT")
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    except (tessera.UsageError, tessera.DataError, tessera.RunError) as error:
        sys.exit(f"error: {error}")
