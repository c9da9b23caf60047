"""Generation from the command line: what is printed, when, and that it follows from the seed."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.embedded.reference import documents
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from modules.generation.beam_search import beam_search
from modules.generation.generate import generate
from modules.generation.quantized import prepare
from modules.generation.sampling import GenerationConfig
from tasks.lm import streaming
from tasks.lm.architectures import load_model
from tasks.lm.streaming import TextStream, prompt_tokens
from tests.tasks.command import run


def said(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `generate` prints."""
    capsys.readouterr()
    assert run(f"generate {line}", "lm") == 0
    return capsys.readouterr().out


def objects(line: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `generate --json` prints."""
    return [json.loads(text) for text in said(f"{line} --json", capsys).splitlines()]


def test_the_same_seed_writes_the_same_text_whatever_else_is_written(
    lm_bytes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"--ckpt_path {lm_bytes} --max_new_tokens 24 --top_k 50 --top_p 0.95 --min_p 0.01 --repetition_penalty 1.1"
    one = said(f'{line} --prompt "The object" --seed 1', capsys)
    assert one.startswith("The object") and one == said(
        f'{line} --prompt "The object" --seed 1', capsys
    )
    assert one != said(f'{line} --prompt "The object" --seed 2', capsys)
    Path("prompts.txt").write_text("A class\n\nA much longer prompt, with a statement in it\n")
    found = objects(
        f'{line} --prompt "The object" --prompt_file prompts.txt --num_samples 2 --seed 1', capsys
    )
    prompts = ["The object", "A class", "A much longer prompt, with a statement in it"]
    assert [(row["prompt"], row["sample"]) for row in found] == [
        (prompt, n) for prompt in prompts for n in (1, 2)
    ]
    assert found[0]["prompt"] + found[0]["text"] + "\n" == one
    assert found[1]["text"] == objects(f'{line} --prompt "The object" --seed 2', capsys)[0]["text"]
    assert all(
        row["tokens"] == 24 and row["ended"] == "length" or row["ended"] == "end" for row in found
    )
    shown = said(
        f'{line} --prompt "The object" --prompt "A class" --num_samples 2 --seed 1', capsys
    )
    for number, row in enumerate(found[:4]):
        heading = f"--- prompt {number // 2 + 1}, sample {number % 2 + 1} "
        assert f"{heading:-<80}\n{row['prompt']}{row['text']}\n" in shown


def test_greedy_and_beams_are_those_of_the_library(
    lm_bytes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(str(lm_bytes))
    ids = prompt_tokens(model, "The object")
    assert ids[0] == model.tokenizer.special_ids.bos  # each document began with it
    made = generate(model.net, [ids], GenerationConfig(40, temperature=0))
    greedy = [int(token) for token in made]
    assert len(greedy) == 40 > model.net.max_length - len(ids)  # the context is outgrown
    line = f'--ckpt_path {lm_bytes} --prompt "The object"'
    (found,) = objects(f"{line} --temperature 0 --max_new_tokens 40", capsys)
    ends = (
        greedy.index(model.tokenizer.special_ids.eos)
        if model.tokenizer.special_ids.eos in greedy
        else 40
    )
    assert found["text"] == model.tokenizer.decode(greedy[:ends])
    config = GenerationConfig(6, beams=3, length_penalty=0.5)
    (best,) = beam_search(model.net, [ids], config, [model.tokenizer.special_ids.eos])
    rows = objects(
        f"{line} --beams 3 --length_penalty 0.5 --max_new_tokens 6 --num_samples 3", capsys
    )
    assert [row["score"] for row in rows] == pytest.approx([score for _, score in best])
    assert [row["text"] for row in rows] == [model.tokenizer.decode(tokens) for tokens, _ in best]


def test_int8_weights_are_those_of_the_library(
    lm_bytes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(str(lm_bytes))
    prompt = [prompt_tokens(model, "The object")]
    exact = model.net.logits(model.net(torch.tensor(prompt)))
    rounded = prepare(model.net, "int8").logits(model.net(torch.tensor(prompt)))  # in place
    assert 0 < (exact - rounded).abs().max() < 0.1 * exact.abs().max()
    made = generate(
        model.net, prompt, GenerationConfig(24, temperature=0), [model.tokenizer.special_ids.eos]
    )
    expected = [int(token) for token in made]
    line = f'--ckpt_path {lm_bytes} --prompt "The object" --temperature 0 --max_new_tokens 24 --quantize int8'
    (found,) = objects(line, capsys)
    assert found["text"] == model.tokenizer.decode(
        [token for token in expected if token != model.tokenizer.special_ids.eos]
    )


def test_a_reader_that_has_seen_enough_is_no_error(lm_bytes: Path) -> None:
    command = f"{sys.executable} -m tasks.lm generate --ckpt_path {lm_bytes} --max_new_tokens 400 --num_samples 4"
    piped = ["bash", "-c", f"{command} | head -c 1; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(
        piped, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + signal.SIGPIPE and "rror" not in done.stderr


def test_no_prompt_begins_a_document_or_a_line(
    lm_bytes: Path,
    lm_letters: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert prompt_tokens(model := load_model(str(lm_bytes)), "") == [
        model.tokenizer.special_ids.bos
    ]
    assert (
        prompt_tokens(model := load_model(str(lm_letters)), "")
        == model.tokenizer.encode_batch(["\n"])[0]
    )
    (row,) = objects(f"--ckpt_path {lm_letters} --max_new_tokens 9", capsys)
    assert row["prompt"] == "" and len(row["text"]) == 9
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The dog\nThe fox\n")))
    rows = objects(f"--ckpt_path {lm_letters} --max_new_tokens 9 --prompt_file -", capsys)
    assert [row["prompt"] for row in rows] == ["The dog", "The fox"]


class Log(io.StringIO):
    """Standard output that notes what is written when."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events, self.waiting = events, ""

    def write(self, text: str) -> int:
        self.waiting += text
        return len(text)

    def flush(self) -> None:
        self.events += [self.waiting] if self.waiting else []
        self.waiting = ""


def test_text_is_printed_as_it_is_made(lm_letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    letters = load_model(str(lm_letters)).tokenizer

    def slow(*_: Any) -> Iterator[torch.Tensor]:
        for letter in "dogs" if "s" in letters.vocab else "dog.":
            events.append("step")
            yield torch.tensor(letters.encode_batch([letter])[0])

    monkeypatch.setattr(streaming, "generate", slow)
    monkeypatch.setattr(sys, "stdout", Log(events))
    assert run(f'generate --ckpt_path {lm_letters} --prompt "lazy "', "lm") == 0
    assert events == ["lazy ", "step", "d", "step", "o", "step", "g", "step", "s", "\n"]


TEXT = "naïve 🙂🙃 zwölf \ufffd ok"


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """Single bytes."""
    return Tokenizer.train(documents()["val"][:4], TokenizerConfig("bpe", 263, lowercase=False))


def parts_of(writer: TextStream, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, and the end."""
    parts, size = [], 0
    for token in [*ids, None]:
        writer.finish() if token is None else writer.add(token)
        parts.append(writer.text[size:])
        size = len(writer.text)
    return parts


def test_characters_are_given_out_whole(pieces: Tokenizer) -> None:
    (ids,) = pieces.encode_batch([TEXT])
    assert len(ids) > len(TEXT) + 6  # bytes
    parts = parts_of(TextStream(pieces, []), ids)
    assert "".join(parts) == TEXT
    assert [part for part in parts if "\ufffd" in part] == ["\ufffd "]  # the one that the text has
    assert [part for part in parts if part][:7] == ["n", "a", "ï", "v", "e", " ", "🙂"]
    assert (
        parts_of(TextStream(pieces, []), ids[:8])[-1] == "\ufffd"
    )  # the end of tokens in the middle of a character


@pytest.mark.parametrize(
    "stop", [["zw"], ["🙂🙃 zw", "xyz"], ["q", "zwölf ", "zwö"], ["zwölf nothing", "zw"]]
)
def test_a_stop_string_ends_the_text_and_is_never_seen(pieces: Tokenizer, stop: list[str]) -> None:
    (ids,) = pieces.encode_batch([TEXT])
    writer = TextStream(pieces, [], stop)
    parts = parts_of(writer, ids)
    end = min(TEXT.index(some) for some in stop if some in TEXT)
    assert "".join(parts) == writer.text == TEXT[:end] and writer.ended == "stop"
    assert parts_of(TextStream(pieces, [], ["ok then"]), ids)[-1].endswith(
        "ok"
    )  # held back until the end


@pytest.mark.parametrize("kind", ("bpe", "wordpiece", "word", "character"))
def test_a_text_goes_on_from_its_prompt_as_it_is_spelled(kind: Any) -> None:
    texts = ["the value of an object is its value, and so on"]
    tokenizer = Tokenizer.train(texts, TokenizerConfig(kind, 400, min_frequency=1))
    prompt, rest = (tokenizer.encode_batch([text])[0] for text in ("the value", " of an object"))
    writer = TextStream(tokenizer, prompt)
    parts_of(writer, rest)
    assert tokenizer.decode(prompt) + writer.text == tokenizer.decode(prompt + rest)


def test_end_tokens_end_a_text_and_others_go_on(lm_bytes: Path) -> None:
    tokenizer = load_model(str(lm_bytes)).tokenizer
    (ids,) = tokenizer.encode_batch(["The object"])
    end = tokenizer.special_id("eos")
    writer = TextStream(tokenizer, [], end_tokens=[end])
    parts_of(writer, [*ids, end, *ids])
    assert (writer.text, writer.ended, writer.tokens) == ("The object", "end", len(ids) + 1)


def test_stop_strings_of_the_command_line(
    lm_letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f'--ckpt_path {lm_letters} --prompt "The quick " --max_new_tokens 40 --temperature 0'
    (whole,) = objects(line, capsys)
    stop = whole["text"][7:10]
    (cut,) = objects(f'{line} --stop "{stop}" --stop "[not JSON"', capsys)
    assert cut["ended"] == "stop" and cut["text"] == whole["text"][: whole["text"].index(stop)]


def test_any_character_may_be_typed(lm_bytes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f'--ckpt_path {lm_bytes} --prompt "hi 🙂" --prompt "zwölf\\n" --max_new_tokens 4'
    rows = objects(line, capsys)
    assert [row["prompt"] for row in rows] == ["hi 🙂", "zwölf\\n"]
    assert objects(f'{line} --stop "🙂" --stop "\u2028"', capsys) == rows


def test_beams_have_their_own_room_in_the_context(
    lm_letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"generate --ckpt_path {lm_letters} --beams 2 --json --max_new_tokens"
    long, short = "The quick brown fox jumps over the lazy dog."[:30], "The "

    def made(options: str, *prompts: str) -> tuple[list[dict[str, Any]], str]:
        assert (
            run(f"{line} {options} " + " ".join(f'--prompt "{prompt}"' for prompt in prompts), "lm")
            == 0
        )
        out, err = capsys.readouterr()
        return [json.loads(row) for row in out.splitlines()], err

    ((alone,), err), (beside, _) = made("20", short), made("20", short, long)
    assert (
        beside[0] == alone
        and alone["tokens"] == 20
        and alone["ended"] == "length"
        and "prompt 1" not in err
    )
    ((row,), err) = made("5", long)  # 28 + 5, of which the last is not read
    assert row["prompt"] == long and row["tokens"] == 5 and row["ended"] == "length"
    assert (
        "prompt 1 has 30 tokens" in err
        and "32, 4 of which beam search keeps for new ones: its last 28 are" in err
    )
    assert row["text"] == made("5", long[-28:])[0][0]["text"]
    ((row,), err) = made("50", short + short)
    assert (
        row["tokens"] == 25
        and row["ended"] == "context"
        and "texts ended with the context of 32 tokens" in err
    )
    ((row,), err) = made("50", long)
    assert row["tokens"] == 17 and row["ended"] == "context" and "its last 16 are read" in err
    assert run(f'{line} 5 --prompt "{long}" --strict', "lm") == 2
    assert run(f'{line} 3 --prompt "{long}" --strict', "lm") == 0


def test_a_long_prompt_is_cut_or_refused(
    lm_letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"generate --ckpt_path {lm_letters} --max_new_tokens 5 --temperature 0 --json --prompt"
    long = "The quick brown fox jumps over the lazy dog."
    assert run(f'{line} "{long}"', "lm") == 0
    out, err = capsys.readouterr()
    assert "prompt 1 has 44 tokens, and the context of the model is 32: its last 32 are read" in err
    assert run(f'{line} "{long[-32:]}"', "lm") == 0
    assert json.loads(capsys.readouterr().out)["text"] == json.loads(out)["text"]
    assert run(f'{line} "{long}" --strict', "lm") == 2
    assert "leave --strict out" in capsys.readouterr().err
