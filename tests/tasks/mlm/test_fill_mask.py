"""`fill_mask`: the tokens of the Python API, printed for a reader and as JSON."""

from pathlib import Path

import pytest
import tessera
import transformers

from tests.helpers.command import Console, run
from tests.helpers.tiny import NET, write_corpus

ONE = "a good [MASK]"
TWO = "a [MASK] film, [MASK] twice"


def test_the_likeliest_tokens_are_printed(runs: Path, console: Console) -> None:
    model = tessera.load(runs / "mlm", kind=tessera.MaskedLanguageModel)
    line = f"fill_mask --ckpt_path {runs}/mlm --top_k 3"
    Path("lines.txt").write_text(f"{ONE}\n\n{TWO}\n")
    printed = console.printed(f"{line} --input lines.txt", "mlm")[0]
    wanted = [ONE.split()]
    wanted += [[one.token, f"{one.probability:.4f}"] for one in model.fill_mask(ONE, 3)[0]]
    wanted += [TWO.split()]
    for number, mask in enumerate(model.fill_mask(TWO, 3), 1):
        wanted += [["mask", str(number)]]
        wanted += [[one.token, f"{one.probability:.4f}"] for one in mask]
    assert [row.split() for row in printed.splitlines()] == wanted
    both = f'{line} --text "{ONE}" --text "{TWO}"'
    assert console.printed(both, "mlm")[0] == printed
    assert console.printed(f"{both} --output out/filled.txt", "mlm")[0] == ""
    assert Path("out/filled.txt").read_text() == printed
    for entry, text in zip(console.objects(both, "mlm"), (ONE, TWO), strict=True):
        found = [[one._asdict() for one in mask] for mask in model.fill_mask(text, 3)]
        assert entry["text"] == text and len(entry["masks"]) == len(found)
        for mask, other in zip(entry["masks"], found, strict=True):
            assert mask == [pytest.approx(one) for one in other]


def test_the_default_is_five_tokens_and_the_weights_may_be_rounded(
    runs: Path, console: Console
) -> None:
    line = f'fill_mask --ckpt_path {runs}/mlm --text "{ONE}"'
    (exact,), (rounded,) = (
        console.objects(f"{line}{more}", "mlm")[0]["masks"] for more in ("", " --quantize int8")
    )
    assert len(exact) == len(rounded) == 5 and exact != rounded
    assert exact[0]["probability"] == pytest.approx(rounded[0]["probability"], rel=0.1)


def test_what_cannot_be_filled_is_refused(runs: Path, console: Console) -> None:
    line = f"fill_mask --ckpt_path {runs}/mlm"
    Path("lines.txt").write_text(f"{ONE}\n\nno mask\n")
    Path("blank.txt").write_text("\n")
    for more, names in {
        "": ("--text", "--input"),
        "--input blank.txt": ("--text", "--input"),
        "--input lines.txt": ("lines.txt, line 3", "[MASK]"),
        "--input lines.txt --output out.txt": ("lines.txt, line 3",),
        "--text 'no mask'": ("--text: the text has no [MASK]",),
        f"--text '{ONE}' --text ''": ("--text 2 of 2: the text has no [MASK]",),
        f"--text '{'two ' * 100} [MASK]'": ("48 tokens",),
        f"--text '{ONE}' --top_k 0": ("top_k is 0",),
    }.items():
        console.refused(f"{line} {more}", *names, task="mlm")
    line = f"fill_mask --ckpt_path {runs}/bert --text '{ONE}'"
    console.refused(line, "TextClassifier", "tasks.mlm", task="mlm")


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "character"])
def test_masks_of_an_export_are_read_as_here(kind: str) -> None:
    """A space before a mask belongs to the masked word."""
    write_corpus(Path("texts"))
    options = f"--preset tiny {NET} --data.tokenizer.kind {kind} --data.tokenizer.vocabulary 300"
    limits = "--trainer.max_steps 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
    assert run(f"fit --data.path texts {options} {limits} --run_dir r", "mlm") == 0
    assert run("export --ckpt_path r --format hf --output out", "mlm") == 0
    model = tessera.load("r", kind=tessera.MaskedLanguageModel)
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer(TWO)["input_ids"] == model.token_ids(TWO)
