"""What the `export` commands share: safetensors, Hugging Face's layout, and files that appear whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from datamodules.tokenizers import Tokenizer
from datamodules.utils.files import errors_naming, replacing, write_text
from tasks.errors import UsageError

TextFormat = Literal["hf", "safetensors"]
Translate = Callable[[Any], tuple[dict[str, Any], dict[str, Tensor]]]


def write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, for `AutoTokenizer`."""
    tokenizer, content = Tokenizer.from_json(facts["tokenizer"]), json.loads(facts["tokenizer"])
    if "marks_documents" in facts:
        write_opening(
            content, tokenizer, tokenizer.boundary_tokens.bos if facts["marks_documents"] else None
        )
    save_tokenizer(content, tokenizer, facts["max_length"], folder)


def export_texts(
    net: Any,
    facts: dict[str, Any],
    ckpt_path: str,
    format: TextFormat,
    output: str | None,
    translate: Translate,
    beside: Callable[[dict[str, Any], Path], None] = write_tokenizer,
) -> None:
    """Write a model of texts for Hugging Face's transformers or any reader of safetensors, and say how to read it.

    Args:
        net: The network.
        facts: Of the data, with their `tokenizer`.
        ckpt_path: Where the network is from.
        format: hf: a folder with weights, configuration and tokenizer; safetensors: see `write_safetensors`.
        output: Folder or file to write; None puts it beside the checkpoint.
        translate: From the network to the content of their `config.json` and its weights under their names; a
            `ValueError` says what they have no model for.
        beside: Writes from the facts what else the folder of a model of theirs holds.
    """
    target = Path(output) if output else Path(ckpt_path).with_suffix(f".{format}")
    if format == "safetensors":
        with new_file(target) as partial:
            hint = write_safetensors(net, facts, partial)
    else:
        with made_folder(target) as folder:
            hint = write_huggingface(net, folder, translate)
            beside(facts, folder)
    print(f"wrote {target}\n{hint.format(file=target)}")


def write_huggingface(net: Any, folder: Path, translate: Translate) -> str:
    """Weights and `config.json`; the hint loads them. Arguments as in `export_texts`.

    Raises:
        UsageError: no model of theirs is like this one; says in what.
    """
    try:
        settings, state = translate(net)
    except ValueError as error:
        raise UsageError(
            f"no model of Hugging Face's is like this one ({str(error).rstrip('.')}): export to safetensors"
        ) from error
    save_weights(state, folder / "model.safetensors", format="pt")
    write_text(folder / "config.json", json.dumps(settings, indent=2))
    return f"transformers.{settings['architectures'][0]}.from_pretrained('{{file}}')"


def save_tokenizer(
    content: dict[str, Any], tokenizer: Tokenizer, max_length: int, folder: Path
) -> None:
    """Writes the content of a `tokenizer.json`, and what it cannot say: the roles of tokens, and the longest text."""
    content.pop(
        "special_tokens", None
    )  # what a foreign tokenizer's other files said; they say it again below
    roles = {
        f"{role}_token": tokenizer.convert_ids_to_tokens([number])[0]
        for role, number in tokenizer.special_ids.known().items()
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        **roles,
    }
    write_text(folder / "tokenizer.json", json.dumps(content, ensure_ascii=False))
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2))


def write_safetensors(net: Any, facts: dict[str, Any], path: Path) -> str:
    """Our names; the header holds the network's options and the data's facts as JSON. Returns how to read it."""
    save_weights(
        net.state_dict(), path, config=json.dumps(asdict(net.config)), facts=json.dumps(facts)
    )
    return "read it with safetensors.torch.load_file('{file}')"


def save_weights(state: Mapping[str, Tensor], path: Path, **header: str) -> None:
    """Write a safetensors file that others may read as they may any new file; safetensors itself lets nobody."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file({name: value.contiguous() for name, value in state.items()}, path, header)
    path.chmod(mode)


@contextmanager
def made_parents(path: Path) -> Iterator[None]:
    """Makes the folders that a path lies in; where what follows fails, those that were made vanish."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # something else is in it by now
                folder.rmdir()
        raise


def write_opening(content: dict[str, Any], tokenizer: Tokenizer, token: int | None) -> None:
    """Let a tokenizer for language models put this token before a text, and none behind it; None: nothing at all.

    Args:
        content: Of its `tokenizer.json`, which is changed.
        tokenizer: The same, to ask for the token's name.
        token: What the model saw at the beginning of documents.
    """
    template = content.get("post_processor") or {}
    if token is not None:
        write_frame(content, tokenizer, [token], [])
    elif template.get("type") == "TemplateProcessing":
        content["post_processor"] = None


def write_frame(
    content: dict[str, Any], tokenizer: Tokenizer, head: list[int], tail: list[int]
) -> None:
    """Let a tokenizer put these tokens before and after a text; arguments as in `write_opening`."""
    names = {number: tokenizer.convert_ids_to_tokens([number])[0] for number in (*head, *tail)}
    before, after = (
        [{"SpecialToken": {"id": names[n], "type_id": 0}} for n in some] for some in (head, tail)
    )
    texts = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*before, texts[0], *after],
        "pair": [*before, *texts, *after],
        "special_tokens": {
            name: {"id": name, "ids": [n], "tokens": [name]} for n, name in names.items()
        },
    }


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write, which takes its name at the end; where writing fails, it vanishes, folders made for it too.

    Raises:
        UsageError: there is a folder of that name.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give the name of a file to write")
    with made_parents(path), replacing(path) as partial:
        yield partial


@contextmanager
def made_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name at the end, or vanishes where filling it fails, those made for it too.

    Raises:
        UsageError: there is something else of that name.
    """
    there = folder.is_symlink() or folder.exists()
    if there and (
        not folder.name or not folder.is_dir() or folder.is_symlink() or any(folder.iterdir())
    ):
        raise UsageError(f"{folder} exists already: give another --output")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with made_parents(folder), errors_naming(folder, partial):
        partial.mkdir()
        try:
            yield partial
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
