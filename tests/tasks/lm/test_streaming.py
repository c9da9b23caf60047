"""Text from tokens, as early as possible: whole characters, stop strings, unknown letters."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tessera
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from datamodules.embedded.reference import documents
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from tasks.errors import UsageError
from tasks.lm.streaming import TextStream
from tests.helpers.command import run
from tests.helpers.tiny import SMALL_LM

TEXT = "naïve 🙂🙃 zwölf \ufffd ok"


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.train(documents()["val"][:4], TokenizerConfig("bpe", 263, lowercase=False))


def chunks(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, and the end."""
    found: list[str] = []
    for token in ids:
        size = len(stream.text)
        stream.add(token)
        found.append(stream.text[size:])
    size = len(stream.text)
    stream.finish()
    return [*found, stream.text[size:]]


def test_text_grows_by_whole_characters(byte_tokenizer: Tokenizer) -> None:
    (ids,) = byte_tokenizer.encode_batch([TEXT])
    assert len(ids) > len(TEXT) + 6  # bytes
    found = chunks(TextStream(byte_tokenizer, []), ids)
    assert "".join(found) == TEXT
    assert [chunk for chunk in found if "\ufffd" in chunk] == ["\ufffd "]  # that of the text
    assert [chunk for chunk in found if chunk][:7] == ["n", "a", "ï", "v", "e", " ", "🙂"]
    assert chunks(TextStream(byte_tokenizer, []), ids[:8])[-1] == "\ufffd"  # an incomplete end


@pytest.mark.parametrize(
    "stop", [["zw"], ["🙂🙃 zw", "xyz"], ["q", "zwölf ", "zwö"], ["zwölf nothing", "zw"]]
)
def test_a_stop_string_is_never_part_of_the_text(
    byte_tokenizer: Tokenizer, stop: list[str]
) -> None:
    (ids,) = byte_tokenizer.encode_batch([TEXT])
    stream = TextStream(byte_tokenizer, [], stop)
    found = chunks(stream, ids)
    end = min(TEXT.index(some) for some in stop if some in TEXT)
    assert "".join(found) == stream.text == TEXT[:end] and stream.ended == "stop"
    held_back = chunks(TextStream(byte_tokenizer, [], ["ok then"]), ids)
    assert held_back[-1].endswith("ok")


@pytest.mark.parametrize("kind", ("bpe", "wordpiece", "word", "character"))
def test_text_continues_its_prompt(kind: Any) -> None:
    texts = ["the value of an object is its value, and so on"]
    tokenizer = Tokenizer.train(texts, TokenizerConfig(kind, 400, min_frequency=1))
    prompt, rest = tokenizer.encode_batch(["the value", " of an object"])
    stream = TextStream(tokenizer, prompt)
    chunks(stream, rest)
    assert tokenizer.decode(prompt) + stream.text == tokenizer.decode(prompt + rest)


def fallback_tokenizer() -> Tokenizer:
    """SentencePiece's, as Llama has it: characters that it lacks are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abc"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend.to_str())


FALLBACK = fallback_tokenizer()


@pytest.mark.parametrize("seed", range(40))
def test_characters_of_several_tokens_stay_whole(seed: int) -> None:
    rng = random.Random(seed)
    prompt, rest = ("".join(rng.choices("ab é一丁丂😀", k=rng.randint(1, 20))) for _ in range(2))
    before, ids = FALLBACK.encode_batch([prompt, prompt + rest])
    stream = TextStream(FALLBACK, before)
    chunks(stream, ids[len(before) :])
    assert FALLBACK.decode(before) + stream.text == FALLBACK.decode(ids)


def test_unknown_characters_are_refused() -> None:
    """Also a line break, which stands for an empty text if no token begins a document."""
    Path("text.txt").write_text("abcd efgh " * 300)
    character = "--data.tokenizer.kind character --data.tokenizer.min_frequency 1"
    line = f"fit {SMALL_LM} --data.path text.txt {character} --trainer.limit_train_batches 1"
    assert run(f"{line} --run_dir r --data.tokenizer.vocabulary 30", "lm") == 0
    model = tessera.load("r", kind=tessera.LanguageModel)
    assert model.score("abcd").tokens > 1
    for call in (model.score, model.embed, model.generate):
        with pytest.raises(UsageError, match="'Z'"):
            call(["abc", "abZ"])
    for call in (model.embed, model.generate):
        with pytest.raises(UsageError, match="U\\+000A"):
            call("")
