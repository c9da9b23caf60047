"""The sentences of `profile`."""

from tasks.profiling.report import Profile, crossover_sentence
from tasks.profiling.timing import Point
from tests.helpers.command import Console


def test_sizes_that_data_decide_are_said(console: Console) -> None:
    line = "profile --max_minutes 1e-9"
    out = " ".join(console.printed(line, "bert")[0].split())
    assert "hidden width of feed-forward 176" in out
    assert "Assumed, since data decide in a training: K, V, T" in out
    out = " ".join(console.printed(f"{line} --vocabulary 500 --lengths 64", "bert")[0].split())
    assert "V 500 (vocabulary)" in out and "decide in a training: K parameters" in out


def test_a_crossover_outside_of_the_lengths_is_not_a_number() -> None:
    def sentence(scores: float) -> str:
        points = [
            Point("length", n, None, 1, n, n, 0, (0, 0), parts={"scores": scores, "projections": 1})
            for n in (4, 16)
        ]
        return crossover_sentence(Profile("", [], {"T": 16}, {}, (0, 0), {}, None, "cpu", points))

    assert "about 8 tokens" in " ".join(sentence(2.0).split())
    assert "not within the lengths here, 4 to 16 tokens" in " ".join(sentence(0.1).split())
