"""Messages and warnings advise what can be done."""

from pathlib import Path

import pytest

from tests.helpers.command import Console, run
from tests.helpers.model_folders import encoder_folder

REVIEWS = "".join(f"a {word} film that was seen on day {i}\n" for i, word in enumerate("gb" * 10))
ONE_EPOCH = "--trainer.max_epochs 1 --data.batch_size 8"


def write_csv(path: str, text: str = "text", label: str = "label", lines: str = REVIEWS) -> None:
    rows = [f"{line},{('neg', 'pos')[i % 2]}" for i, line in enumerate(lines.splitlines())]
    Path(path).write_text("\n".join([f"{text},{label}", *rows]) + "\n")


@pytest.mark.parametrize(
    ("length", "advice"),
    [(6, "raise --data.max_length, to 8 at most"), (8, "the model reads no more")],
)
def test_no_longer_texts_than_the_pretrained_positions(
    length: int, advice: str, console: Console
) -> None:
    encoder_folder(Path("theirs"), "BertForMaskedLM", max_position_embeddings=8)
    write_csv("a.csv")
    line = f"fit --data.path a.csv --model.pretrained theirs --data.max_length {length} {ONE_EPOCH}"
    with pytest.warns(UserWarning, match=f"20 of 20 texts: truncated.*{advice}"):
        assert run(line, "bert") == 0
    console.refused(f"{line} --data.max_length 9", "--data.max_length 9 exceeds", task="bert")
