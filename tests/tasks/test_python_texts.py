"""`import tessera`: what models of texts do with masks, long texts and options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import tessera
import torch
from tessera.options import GenerationOptions, SamplingOptions, TranslationOptions

from datamodules.corpus import CorpusData
from modules.generation.sampling import GenerationConfig
from tasks.checkpoints.generation_config import FolderGeneration, GenerationSettings
from tasks.cli.app import app as find_app
from tasks.cli.app import load
from tasks.errors import UsageError
from tasks.igpt.sampling import PixelSampling
from tests.helpers.tiny_models import close


def test_a_continuation_joins_the_word_before_it(runs: Path) -> None:
    model = tessera.load(runs / "mlm", kind=tessera.MaskedLanguageModel)
    tokenizer = model.tokenizer
    count = tokenizer.vocab_size
    for text, starts in (
        ("a [MASK] film", True),
        ("a [MASK] film", False),
        ("a[MASK] film", False),
    ):
        (found,) = model.fill_mask(text, top_k=count)
        ids = {one.token: tokenizer.vocab.get(one.token) for one in found}
        words = [one for one in found if one.token.removeprefix("##").isalnum()]
        words = [one for one in words if one.token.startswith("##") != starts]
        assert len(words) > 5
        before, after = tokenizer.encode_batch(["a", "film"])
        for one in words:
            assert one.text == tokenizer.decode([*before, ids[one.token], *after])


def test_warnings_name_the_line_of_the_user(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A text that is too long is truncated, with a warning, whatever the method."""
    text = "two three four " * 100
    calls: dict[str, list[Callable[[Any], Any]]] = {
        "bert": [
            lambda model: model.predict(text),
            lambda model: model.embed([text]),
            lambda model: model.attention(text),
        ],
        "mlm": [lambda model: model.embed(text), lambda model: model.attention(text)],
        "lm": [
            lambda model: model.generate(text, max_new_tokens=1),
            lambda model: model.generate([text], beams=2, max_new_tokens=1),
            lambda model: list(model.stream(text, max_new_tokens=1)),
            lambda model: model.embed(text),
            lambda model: model.attention(text),
        ],
        "seq2seq": [
            lambda model: model.translate(text),
            lambda model: model.translate(["two"] * 200 + [text]),
            lambda model: model.embed([text]),
            lambda model: model.attention(text),
            lambda model: model.attention("two", text),
        ],
    }
    for task, some in calls.items():
        model = tessera.load(runs / task)
        for call in some:
            with pytest.warns(UserWarning, match="truncated to") as found:
                call(model)
            assert {warning.filename for warning in found} == {__file__}
    predictor = tessera.Predictor(runs / "bert")
    with pytest.warns(UserWarning, match="truncated to") as found:
        predictor({"text": np.array([text])})
    assert {warning.filename for warning in found} == {__file__}
    translator = tessera.load(runs / "seq2seq", kind=tessera.Translator)
    for pair in ((text, "TWO"), ("two", text)):
        with pytest.raises(UsageError, match="shorten"):
            translator.score(*pair)
    language = tessera.load(runs / "lm", kind=tessera.LanguageModel)
    assert language.score(text * 10, stride=1).tokens > 100
    assert capfd.readouterr() == ("", "")


def test_vectors_do_not_depend_on_the_batch(runs: Path) -> None:
    texts = ["two", "three four five six", "", "seven eight nine"]
    for task in ("bert", "mlm", "lm", "seq2seq"):
        model = tessera.load(runs / task)
        together = model.embed(texts, batch_size=3)
        close([*together], [model.embed(text) for text in texts])
        with pytest.raises(UsageError, match="batch_size"):
            model.embed(texts, batch_size=0)


def test_sources_are_padded_as_in_training(runs: Path) -> None:
    """The padding of targets may be no token of sources."""
    model = tessera.load(runs / "seq2seq", kind=tessera.Translator)
    model.metadata = {**model.metadata, "pad_id": model.net.vocabulary + 5}
    together = model.embed(["two", "three four five six"])
    close([*together], [model.embed("two"), model.embed("three four five six")])


def test_texts_that_are_not_unicode_are_numbered_as_given(runs: Path) -> None:
    bad = "two \udcff"
    for task, method in (("seq2seq", "translate"), ("lm", "generate"), ("bert", "embed")):
        model = tessera.load(runs / task)
        with pytest.raises(UsageError, match=r"texts\[2\] is not UTF-8: 'two \\udcff'"):
            getattr(model, method)(["", "two", bad])
        with pytest.raises(UsageError, match="the text is not UTF-8"):
            model.attention(bad)


def test_paths_of_pathlib_and_run_folders(runs: Path) -> None:
    for task in ("bert", "mlm", "lm", "seq2seq"):
        kind = load(find_app(task).task)
        trained = kind.load_from_checkpoint(runs / task)
        again = kind(net=trained.net_config, pretrained=runs / task).build(trained.metadata)
        weights = trained.net.state_dict()
        for name, value in again.state_dict().items():
            assert torch.equal(value, weights[name]), name
    data = CorpusData(path=runs / "texts", max_length=32)  # type: ignore[arg-type]
    data.setup("fit")
    assert len(data.train_dataloader()) > 0


def test_types_of_options_are_those_of_the_configs() -> None:
    more = {"batch_size": int}
    for options, config in (
        (SamplingOptions, get_type_hints(PixelSampling)),
        (GenerationOptions, get_type_hints(GenerationConfig)),
        (TranslationOptions, get_type_hints(GenerationConfig) | more),
    ):
        assert get_type_hints(options) == config


def test_options_of_generation_are_checked(runs: Path) -> None:
    language = tessera.load(runs / "lm", kind=tessera.LanguageModel)
    translator = tessera.load(runs / "seq2seq", kind=tessera.Translator)
    wrong: list[dict[str, Any]] = [
        {"top_k": -3}, {"temperature": -1}, {"beams": 0}, {"top_p": "x"}, {"max_new_tokens": 2.5},
    ]  # fmt: skip
    for options in wrong:
        (name,) = options
        for call in (language.generate, language.stream, translator.translate):
            with pytest.raises(UsageError, match=name):
                call("two", **options)
    with pytest.raises(UsageError, match="batch_size"):
        translator.translate("two", batch_size=0)
    with pytest.raises(UsageError, match="stop"):
        language.generate("two", stop=[3])  # type: ignore[call-overload]
    with pytest.raises(UsageError) as found:
        language.generate("two", nonsense=1)
    names = str(found.value).partition("choose from ")[2]
    assert names.startswith("max_new_tokens, temperature, top_k, top_p")


def test_parts_of_a_stream_come_as_they_are_generated(runs: Path) -> None:
    model = tessera.load(runs / "lm", kind=tessera.LanguageModel)
    passes: list[int] = []
    model.net.register_forward_hook(lambda *_: passes.append(1))
    before = [len(passes) for part in model.stream("two three", max_new_tokens=12) if part]
    assert len(before) > 2 and before[0] < before[-1] == len(passes)


def test_threads_are_set(runs: Path) -> None:
    for wanted in (2, 1):
        tessera.load(runs / "lm", threads=wanted)
        assert torch.get_num_threads() == wanted


def test_a_translation_is_explained_as_it_is_made(translator: Path) -> None:
    """With the settings of the model's folder."""
    model = tessera.load(translator, kind=tessera.Translator)
    text = "two three four five"
    alone = model.translate(text)
    settings = GenerationSettings(do_sample=True, temperature=5.0, max_new_tokens=4)
    generation = FolderGeneration(Path("generation_config.json"), settings, (), 0)
    model.model = model.model._replace(generation=generation)
    assert model.translate(text) != alone
    with pytest.raises(UsageError, match="set beams to 1"):
        model.translate(text, beams=2, temperature=1.0)
    queries = [token for token in model.attention(text).queries if not token.startswith("[")]
    assert queries == model.translate(text).split()
    with pytest.raises(UsageError, match="empty"):
        model.attention(" ")


def test_number_of_texts_of_a_folder_is_ignored(runs: Path) -> None:
    """A method returns one text for each."""
    translator = tessera.load(runs / "seq2seq", kind=tessera.Translator)
    settings = GenerationSettings(num_beams=4, num_return_sequences=3)
    generation = FolderGeneration(Path("generation_config.json"), settings, (), 0)
    translator.model = translator.model._replace(generation=generation)
    assert isinstance(translator.translate("two", beams=1), str)
