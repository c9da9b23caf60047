"""Data diversification (Nguyen 2020): a translator learns from what two others translated, too.

    python -m configs.examples.data_diversification FORWARD BACKWARD FOLDER OUTPUT

FORWARD and BACKWARD are run folders of `python -m tasks.seq2seq fit`, the second with the languages
of the first swapped. FOLDER has aligned files such as train.en and train.de, also as .gz. FORWARD
translates all training sources, BACKWARD all training targets. OUTPUT gets three kinds of training
pairs: those of FOLDER, sources with FORWARD's translations, and targets with BACKWARD's; and all
other files of FOLDER as they are, for `--data.path OUTPUT`. All steps for Multi30k, where the first
two can run at the same time:

    export TESSERA_DATA=FOLDER_ABOVE_MULTI30K
    python -m tasks.seq2seq fit --config configs/seq2seq/multi30k_cpu.yaml \
        --trainer.max_epochs 14 --model.average 4 --run_dir runs/forward
    python -m tasks.seq2seq fit --config configs/seq2seq/multi30k_cpu.yaml \
        --trainer.max_epochs 14 --model.average 4 --run_dir runs/backward --data.languages de-en
    python -m configs.examples.data_diversification runs/forward runs/backward \
        $TESSERA_DATA/multi30k runs/more_pairs
    python -m tasks.seq2seq fit --config configs/seq2seq/multi30k_cpu.yaml \
        --data.path runs/more_pairs --data.dataset.local null --trainer.max_epochs 14

`configs/README.md` has the BLEU of these runs.
"""

import gzip
import shutil
import sys
from pathlib import Path

import tessera


def load(run: str) -> tessera.Translator:
    """The translator of a run folder."""
    model = tessera.load(run)
    if not isinstance(model, tessera.Translator):
        sys.exit(f"error: {run} is not a translator: give a run folder of tasks.seq2seq")
    return model


def find(folder: Path, language: str) -> Path:
    """The training file of a language."""
    for name in (f"train.{language}", f"train.{language}.gz"):
        if (folder / name).is_file():
            return folder / name
    sys.exit(f"error: {folder} has no train.{language}: give the folder of the pairs as FOLDER")


def read(path: Path) -> list[str]:
    """The lines of a file, plain or compressed."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return text.decode().removesuffix("\n").split("\n")


def translate(model: tessera.Translator, texts: list[str]) -> list[str]:
    """One translation of each text, by beam search."""
    source, target = model.metadata["languages"]
    print(f"translating {len(texts):,} texts from {source} to {target}", flush=True)
    return model.translate(texts, batch_size=128)


def main(forward: str, backward: str, folder: Path, output: Path) -> None:
    if output.exists():
        sys.exit(f"error: {output} exists: give another OUTPUT")
    models = [load(forward), load(backward)]
    languages = models[0].metadata["languages"]
    if models[1].metadata["languages"] != languages[::-1]:
        sys.exit(f"error: BACKWARD must translate from {languages[1]} to {languages[0]}")
    files = [find(folder, language) for language in languages]
    sources, targets = (read(file) for file in files)
    pairs = [
        *zip(sources, targets, strict=True),
        *zip(sources, translate(models[0], sources), strict=True),
        *zip(translate(models[1], targets), targets, strict=True),
    ]
    unique = [*dict.fromkeys(pairs)]
    output.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        if not file.name.startswith("train."):
            shutil.copy(file, output)
    for language, texts in zip(languages, zip(*unique, strict=True), strict=True):
        lines = "".join(f"{text}\n" for text in texts)
        (output / f"train.{language}").write_text(lines, encoding="utf-8")
    print(f"{len(unique):,} training pairs are in {output}, {len(sources):,} of them given")


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("error: give FORWARD, BACKWARD, FOLDER and OUTPUT")
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
