"""`generate` and `score`: what is printed and when, and what it follows from."""

import gzip
import io
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera
import torch
import torch.nn.functional as F

from modules.generation import quantized
from modules.generation.beam_search import beam_search
from modules.generation.generate import generate
from modules.generation.quantized import prepare
from modules.generation.sampling import GenerationConfig
from modules.kernels.cross_entropy import IGNORE_INDEX
from tasks.lm import streaming
from tasks.lm.architectures import LanguageModel, load_model
from tasks.lm.score import total_losses, windows
from tasks.lm.streaming import prompt_tokens
from tests.helpers.command import ROOT, Console, Patch, run
from tests.helpers.tiny import write_corpus
from tests.helpers.tiny_models import close

TASK = "lm"


def greedy_text(model: LanguageModel, ids: list[int], size: int) -> str:
    """The greedy text after a prompt, to the end of the document or of the length."""
    tokens = [int(token) for token in generate(model.net, [ids], GenerationConfig(size, 0.0))]
    eos = model.tokenizer.special_ids.eos
    return model.tokenizer.decode(tokens[: tokens.index(eos)] if eos in tokens else tokens)


# Commands -----------------------------------------------------------------------------------------


def test_the_seed_decides_whatever_else_is_in_the_batch(lm_bytes: Path, console: Console) -> None:
    line = f"generate --ckpt_path {lm_bytes} --max_new_tokens 24 --top_k 50 --top_p 0.95"
    line += " --min_p 0.01 --repetition_penalty 1.1"
    one, _ = console.printed(f'{line} --prompt "The object" --seed 1', TASK)
    assert one.startswith("The object")
    (two,) = console.objects(f'{line} --prompt "The object" --seed 2', TASK)
    Path("prompts.txt").write_text("A class\n\nA much longer prompt, with a statement in it\n")
    prompts = ["The object", "A class", "A much longer prompt, with a statement in it"]
    options = '--prompt "The object" --input prompts.txt --samples 2 --seed 1'
    found = console.objects(f"{line} {options}", TASK)
    order = [(prompt, sample) for prompt in prompts for sample in (1, 2)]
    assert [(row["prompt"], row["sample"]) for row in found] == order
    assert found[0]["prompt"] + found[0]["text"] + "\n" == one
    assert found[1]["text"] == two["text"] != found[0]["text"]
    for row in found:
        assert row["ended"] == "end" or (row["ended"], row["tokens"]) == ("length", 24)
    out, _ = console.printed(f"{line} {options}", TASK)
    for number, row in enumerate(found):
        heading = f"--- prompt {number // 2 + 1}, sample {number % 2 + 1} "
        assert f"{heading:-<80}\n{row['prompt']}{row['text']}\n" in out


def test_greedy_and_beam_search_are_those_of_the_library(lm_bytes: Path, console: Console) -> None:
    model = load_model(str(lm_bytes))
    ids = prompt_tokens(model, "The object")
    assert ids[0] == model.tokenizer.special_ids.bos  # as in training
    assert model.net.max_length - len(ids) < 40  # beyond the context
    line = f'generate --ckpt_path {lm_bytes} --prompt "The object"'
    (row,) = console.objects(f"{line} --temperature 0 --max_new_tokens 40", TASK)
    assert row["text"] == greedy_text(model, ids, 40)
    config = GenerationConfig(6, beams=3, length_penalty=0.5)
    (best,) = beam_search(model.net, [ids], config, [model.tokenizer.special_ids.eos])
    options = "--beams 3 --length_penalty 0.5 --max_new_tokens 6 --samples 3"
    rows = console.objects(f"{line} {options}", TASK)
    assert [row["score"] for row in rows] == pytest.approx([score for _, score in best])
    assert [row["text"] for row in rows] == [model.tokenizer.decode(tokens) for tokens, _ in best]


def test_int8_weights_change_the_perplexity_by_little(lm_letters: Path, console: Console) -> None:
    """Of a trained model, on the text that it has learned; the greedy text stays."""
    text = "The quick brown fox jumps over the lazy dog.\n" * 60
    model = load_model(str(lm_letters))
    ids = np.array(model.tokenizer.encode_batch([text])[0], np.uint16)
    prompt = prompt_tokens(model, "The quick ")
    greedy = greedy_text(model, prompt, 20)
    ((exact, _, count),) = total_losses(model.net, [ids], stride=16, batch_size=8)
    net = prepare(model.net, "int8")
    ((rounded, _, _),) = total_losses(net, [ids], 16, batch_size=8)
    assert exact / count < 0.7 * math.log(model.net.vocabulary)  # it is trained
    assert 0 < abs(rounded - exact) / count < 0.01
    ((loss, _, _),) = total_losses(net, [ids[:20]], 16, batch_size=8)
    tokens = torch.from_numpy(ids[:20].astype(np.int64))
    logits = net.logits(net(tokens[None, :-1])[0])  # (19, V), those that `generate` computes
    expected = F.cross_entropy(logits, tokens[1:], reduction="sum")
    assert loss == pytest.approx(float(expected), rel=1e-6)
    line = f'generate --ckpt_path {lm_letters} --prompt "The quick " --temperature 0'
    (row,) = console.objects(f"{line} --max_new_tokens 20 --quantize int8", TASK)
    assert row["text"] == greedy


def test_prompts_are_numbered_over_all_batches(lm_letters: Path) -> None:
    model = tessera.load(lm_letters, kind=tessera.LanguageModel)
    with pytest.warns(UserWarning, match="prompt 2") as said:
        found = model.generate(["The", "q" * 999], batch_size=1, max_new_tokens=4)
    assert len(found) == 2 and len(said) == 1


def test_int8_without_kernels_saves_no_time_and_says_so(
    lm_letters: Path, console: Console, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(quantized, "HAS_FBGEMM", False)
    line = f"generate --ckpt_path {lm_letters} --max_new_tokens 9 --quantize int8"
    with pytest.warns(UserWarning, match="no kernels for products of int8 weights"):
        (row,) = console.objects(f"{line} --prompt The", TASK)
    assert len(row["text"]) == 9


def test_fewer_texts_than_samples(lm_letters: Path, console: Console) -> None:
    """Beam search finds no more texts of one token than there are tokens."""
    line = f"generate --ckpt_path {lm_letters} --beams 90 --samples 90 --max_new_tokens 1"
    rows = console.objects(f"{line} --prompt a --prompt b", TASK)
    samples = [row["sample"] for row in rows]
    assert samples == 2 * [*range(1, len(rows) // 2 + 1)] and len(rows) < 180
    out, _ = console.printed(f"{line} --prompt a --prompt b", TASK)
    assert out.count("--- prompt 2, sample 1 --") == 1


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(lm_bytes: Path) -> None:
    command = f"{sys.executable} -m tasks.lm generate --ckpt_path {lm_bytes} --samples 4"
    piped = f"{command} --max_new_tokens 400 | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGPIPE and "rror" not in done.stderr


def test_an_empty_prompt_begins_a_document_or_a_line(
    lm_bytes: Path, lm_letters: Path, console: Console, monkeypatch: Patch
) -> None:
    model = load_model(str(lm_bytes))
    assert prompt_tokens(model, "") == [model.tokenizer.special_ids.bos]
    model = load_model(str(lm_letters))
    assert prompt_tokens(model, "") == model.tokenizer.encode_batch(["\n"])[0]
    line = f"generate --ckpt_path {lm_letters} --max_new_tokens 9"
    (row,) = console.objects(line, TASK)
    assert row["prompt"] == "" and len(row["text"]) == 9
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The dog\nThe fox\n")))
    rows = console.objects(f"{line} --input -", TASK)
    assert [row["prompt"] for row in rows] == ["The dog", "The fox"]


class Log(io.StringIO):
    """Standard output that records what each flush writes."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events
        self.waiting = ""

    def write(self, text: str) -> int:
        self.waiting += text
        return len(text)

    def flush(self) -> None:
        self.events += [self.waiting] if self.waiting else []
        self.waiting = ""


def test_each_token_is_printed_at_once(lm_letters: Path, monkeypatch: Patch) -> None:
    events: list[str] = []
    tokenizer = load_model(str(lm_letters)).tokenizer

    def slow(*_: Any) -> Iterator[torch.Tensor]:
        for letter in "dog":
            events.append("step")
            yield torch.tensor(tokenizer.encode_batch([letter])[0])

    monkeypatch.setattr(streaming, "generate", slow)
    monkeypatch.setattr(sys, "stdout", Log(events))
    assert run(f'generate --ckpt_path {lm_letters} --prompt "lazy "', TASK) == 0
    assert events == ["lazy ", "step", "d", "step", "o", "step", "g", "\n"]


def test_stop_strings_and_any_character(lm_letters: Path, lm_bytes: Path, console: Console) -> None:
    line = f'generate --ckpt_path {lm_letters} --prompt "The quick " --temperature 0'
    (whole,) = console.objects(line, TASK)
    stop = whole["text"][7:10]
    (cut,) = console.objects(f'{line} --stop "{stop}" --stop "[not JSON"', TASK)
    assert cut["ended"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    line = f'generate --ckpt_path {lm_bytes} --prompt "hi 🙂" --prompt "zwölf\\n"'
    rows = console.objects(f"{line} --max_new_tokens 4", TASK)
    assert [row["prompt"] for row in rows] == ["hi 🙂", "zwölf\\n"]
    stops = '--stop "🙂" --stop "\u2028"'
    assert console.objects(f"{line} --max_new_tokens 4 {stops}", TASK) == rows


def test_beam_search_within_the_context(lm_letters: Path, console: Console) -> None:
    line = f"generate --ckpt_path {lm_letters} --beams 2 --json --max_new_tokens"
    short = "The "
    long = "The quick brown fox jumps over the lazy dog."[:30]

    def generated(size: int, *prompts: str) -> tuple[list[dict[str, Any]], str]:
        options = " ".join(f'--prompt "{prompt}"' for prompt in prompts)
        out, err = console.printed(f"{line} {size} {options}", TASK)
        return [json.loads(row) for row in out.splitlines()], err

    (alone,), err = generated(20, short)
    assert (alone["tokens"], alone["ended"]) == (20, "length") and "prompt 1" not in err
    assert generated(20, short, long)[0][0] == alone
    (row,), err = generated(5, long)  # 28 + 5, of which the last is not read
    assert (row["prompt"], row["tokens"], row["ended"]) == (long, 5, "length")
    assert "prompt 1 has 30 tokens" in err and "truncated to 28 tokens, keeping the tail" in err
    assert row["text"] == generated(5, long[-28:])[0][0]["text"]
    (row,), err = generated(50, short + short)
    assert (row["tokens"], row["ended"]) == (25, "context") and "context of 32 tokens" in err
    (row,), err = generated(50, long)
    assert (row["tokens"], row["ended"]) == (
        17,
        "context",
    ) and "truncated to 16 tokens, keeping the tail" in err
    console.refused(f'{line} 5 --prompt "{long}" --strict', "--strict", task=TASK)
    assert run(f'{line} 3 --prompt "{long}" --strict', TASK) == 0


def test_a_long_prompt_is_cut_or_refused(lm_letters: Path, console: Console) -> None:
    line = f"generate --ckpt_path {lm_letters} --max_new_tokens 5 --temperature 0 --json --prompt"
    long = "The quick brown fox jumps over the lazy dog."
    out, err = console.printed(f'{line} "{long}"', TASK)
    assert "prompt 1 has 44 tokens" in err and "truncated to 32 tokens, keeping the tail" in err
    end, _ = console.printed(f'{line} "{long[-32:]}"', TASK)
    assert json.loads(end)["text"] == json.loads(out)["text"]
    console.refused(f'{line} "{long}" --strict', "--strict", task=TASK)


# Scores -------------------------------------------------------------------------------------------


@torch.no_grad()
def sum_of_losses(model: LanguageModel, ids: list[int], stride: int) -> float:
    """The sum of the losses, each token from a forward pass of its own."""
    length = model.net.max_length
    total = 0.0
    for position in range(1, len(ids)):
        first = max(0, -(-(position - length) // stride)) * stride  # window with it as a target
        logits = model.net.logits(model.net(torch.tensor([ids[first:position]]))[:, -1])  # (1, V)
        total -= float(logits.log_softmax(-1)[0, ids[position]])
    return total


@pytest.mark.parametrize("size", (2, 33, 34, 70))
@pytest.mark.parametrize("stride", (1, 7, 32))
def test_every_token_counts_once_after_those_of_its_window(
    lm_letters: Path, stride: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(lm_letters))
    ids = torch.randint(7, model.net.vocabulary, (size,)).tolist()
    texts = [np.array(part, np.uint16) for part in (ids[:2], ids, ids[:40])]
    for tokens, (loss, correct, count) in zip(
        texts, total_losses(model.net, texts, stride, batch_size=3), strict=True
    ):
        assert count == len(tokens) - 1 and 0 <= correct <= count
        expected = sum_of_losses(model, tokens.tolist(), stride)
        assert loss == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr("tasks.lm.score.LOGITS_PER_CHUNK", 5 * model.net.vocabulary)
    packed = prepare(model.net)
    found = total_losses(packed, texts, stride, batch_size=3)
    for tokens, (loss, *_) in zip(texts, found, strict=True):
        assert loss == pytest.approx(sum_of_losses(model, tokens.tolist(), stride), rel=1e-5)
    for inputs, targets in windows(np.arange(size), 8, 3):
        assert inputs.shape == targets.shape
        assert ((targets == inputs + 1) | (targets == IGNORE_INDEX)).all()


@pytest.mark.parametrize(("text", "size"), (("Th", 1), ("The lazy dog", 11)))
def test_the_first_token_does_not_count(
    text: str, size: int, lm_letters: Path, console: Console
) -> None:
    Path("text.txt").write_text(text)
    (found,) = console.objects(f"score --ckpt_path {lm_letters} --input text.txt", TASK)
    assert found["bytes"] == found["tokens"] == size
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


def test_score_of_files(lm_bytes: Path, console: Console) -> None:
    text = sorted(write_corpus(Path("texts")).iterdir())[-1].read_text()[:300] + "\nzwölf\n"
    Path("text.txt.gz").write_bytes(gzip.compress(text.encode()))
    model = load_model(str(lm_bytes))
    (ids,) = model.tokenizer.encode_batch([text])
    ids = [model.tokenizer.special_id("bos"), *ids, model.tokenizer.special_id("eos")]
    line = f"score --ckpt_path {lm_bytes} --input"
    (found,) = console.objects(f"{line} text.txt.gz", TASK)
    loss = sum_of_losses(model, ids, 16) / (len(ids) - 1)
    size = len(text.encode())
    assert (found["tokens"], found["bytes"]) == (len(ids) - 1, size)
    assert (found["context"], found["stride"]) == (32, 16)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)
    out, _ = console.printed(f"{line} text.txt.gz --stride 4 --batch_size 3", TASK)
    assert "bits_per_byte" in out and "text.txt.gz" in out
    (found,) = console.objects(f"{line} texts --stride 32", TASK)
    assert found["bytes"] == sum(path.stat().st_size for path in Path("texts").iterdir())


def test_a_text_is_scored_as_a_file_with_it(lm_bytes: Path, console: Console) -> None:
    text = "def f(x):\n    return x\n\nzwölf"
    Path("text.txt").write_text(text)
    line = f"score --ckpt_path {lm_bytes} --stride 4"
    found = console.objects(f"{line} --text '{text}'", TASK)
    assert found == console.objects(f"{line} --input text.txt", TASK)
    tables = [
        console.printed(f"{line} {given}", TASK)[0].splitlines()
        for given in (f"--text '{text}'", "--input text.txt")
    ]
    titles = [table.pop(0).strip() for table in tables]
    assert titles == ["def f(x): return x zwölf", "text.txt"]
    assert tables[0] == tables[1]
    two = console.objects(f"{line} --text 'no' --text '{text}'", TASK)
    assert two == [*console.objects(f"{line} --text 'no'", TASK), *found]


def test_score_needs_one_text(lm_letters: Path, console: Console) -> None:
    Path("text.txt").write_text("The lazy dog")
    line = f"score --ckpt_path {lm_letters}"
    for more, *names in (
        ("", "either --text or --input"),
        ("--input text.txt --text The", "either --text or --input"),
        ("--text ' '", "--text is empty"),
        ("--text T", "--text has only one token"),
        ("--text The\udcff", "--text"),
    ):
        console.refused(f"{line} {more}", *names, task=TASK)
    console.refused(f"{line} --text schön", "'ö' (U+00F6)", "--text", task=TASK)


def test_changed_logits_are_scored(lm_letters: Path) -> None:
    model = tessera.load(lm_letters, kind=tessera.LanguageModel)
    before = model.score("abab").loss
    with model.intervene({"logits": lambda x: 1 * x}):
        assert model.score("abab").loss == pytest.approx(before)
    with model.intervene({"logits": lambda x: 0 * x}):
        assert model.score("abab").loss == pytest.approx(math.log(model.tokenizer.vocab_size))


def test_a_vector_without_the_causal_mask_does_not_depend_on_other_texts(
    lm_letters: Path, monkeypatch: Patch
) -> None:
    model = tessera.load(lm_letters, kind=tessera.LanguageModel)
    stack = replace(model.net.config.stack, causal=False)
    monkeypatch.setattr(model.net, "config", replace(model.net.config, stack=stack))
    monkeypatch.setattr(model.net.stack, "config", stack)
    several = model.embed(["ab", "abcabcabc"])
    close(several[0], model.embed("ab"))
