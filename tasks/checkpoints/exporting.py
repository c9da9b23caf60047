"""What the `export` commands share: safetensors, Hugging Face's layout, and atomic writing."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from datamodules.tokenizers import Tokenizer, truncation_settings
from datamodules.utils.files import errors_naming, replacing, write_text
from modules.pretrained.weights import CLASSIFIERS
from tasks.checkpoints.onnx_graph import write_graph
from tasks.checkpoints.reading import VERSION, best_checkpoint
from tasks.errors import UsageError

TextFormat = Literal["hf", "onnx", "safetensors"]
FILE_SUFFIXES = (".onnx", ".safetensors", ".bin", ".pt", ".ckpt")  # which no folder should have
# From a network to the content of config.json and its weights under their names.
Convert = Callable[[Any], tuple[dict[str, Any], dict[str, Tensor]]]
# Of each input of a `TextGraph`: the name of its second axis, and what to pass.
INPUTS = {
    "input_ids": ("sequence", "tokens"),
    "attention_mask": ("sequence", "int64_0_at_padding"),
    "decoder_input_ids": ("decoder_sequence", "start_and_target_tokens"),
}


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, for `AutoTokenizer`."""
    kept = metadata["tokenizer_options"]["truncate"]
    tokenizer = Tokenizer.from_json(metadata["tokenizer"], kept)
    content = json.loads(metadata["tokenizer"])
    if "marks_documents" in metadata:  # a language model
        bos = tokenizer.boundary_tokens.bos if metadata["marks_documents"] else None
        template = content.get("post_processor") or {}
        if bos is not None:
            set_special_tokens(content, tokenizer, [bos], [])
        elif template.get("type") == "TemplateProcessing":
            content["post_processor"] = None
    reads_masks = "next_sentence" in metadata  # a masked language model
    if reads_masks and not tokenizer.is_character_level:  # a mask includes the space before it
        for token in content["added_tokens"]:
            token["lstrip"] = token["id"] == tokenizer.special_ids.mask or token["lstrip"]
    # Other models read "[SEP]" in a text as any text.
    settings = {} if reads_masks else {"split_special_tokens": True}
    save_tokenizer(content, tokenizer, metadata["max_length"], folder, settings)


def with_numbers_in_units(net: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Scales a regression's output to the unit of its numbers; returns metadata that say so."""
    if metadata.get("problem_type") != "regression":
        return metadata
    with torch.no_grad():
        for name, value in net.state_dict().items():
            if name.startswith(CLASSIFIERS):
                value.mul_(metadata.get("target_std", 1.0))
                if name.endswith("bias"):
                    value.add_(metadata.get("target_mean", 0.0))
    return metadata | {"target_mean": 0.0, "target_std": 1.0}


def check_writable(folder: Path, option: str = "--run_dir") -> None:
    """Raise `UsageError` if the folder of an option cannot be created or written."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise UsageError(f"{option} {folder} ({error.strerror}): give another folder") from error
    if not existing.is_dir():
        raise UsageError(f"{option} {folder}: {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"{option} {folder} cannot be used: you may not write to {existing}"
        raise UsageError(f"{text}; give another {option}")


def export_target(ckpt_path: str, format: str, output: str | None, is_file: bool) -> Path:
    """Returns the file or folder to write; without `output`, one beside the checkpoint.

    Raises `UsageError` if the name of a file has not the suffix of its format, or that of a folder
    has the suffix of a file; or if the file exists, as `new_folder` does for a folder.
    """
    suffix = f".{format}"
    if output is None:
        path = Path(best_checkpoint(ckpt_path))
        if ckpt_path.startswith("hf/"):  # of the hub: in the current folder
            path = Path(path.name)
        path = path.resolve() if path.name in ("", "..") else path
        name = path.stem if path.suffix in FILE_SUFFIXES else path.name
        output = str(path.with_name(f"{name}{suffix}" if is_file else f"{name}_{format}"))
    target = Path(output)
    if is_file and target.suffix != suffix:
        raise UsageError(
            f"--output {output}: the format {format} is a file: give a name that ends with {suffix}"
        )
    if not is_file and target.suffix in FILE_SUFFIXES:
        raise UsageError(
            f"--output {output}: the format {format} is a folder with several files: give a name "
            f"without {target.suffix}"
        )
    if is_file and os.path.lexists(target) and not target.is_dir():
        raise UsageError(exists_message(target))
    check_writable(target.parent, "--output")
    return target


def exists_message(target: Path) -> str:
    """Returns what to do if the file or folder to write is there."""
    return f"{target} exists already: give another --output, or remove it"


def text_target(ckpt_path: str, format: TextFormat, output: str | None) -> Path:
    """Returns where a model of text is written; as `export_target`."""
    return export_target(ckpt_path, format, output, is_file=format == "safetensors")


def export_model(
    task: str,
    net: Any,
    metadata: dict[str, Any],
    target: Path,
    format: TextFormat,
    convert: Convert,
    write_onnx: Callable[[Path], str],
    write_more: Callable[[dict[str, Any], Path], None] = write_tokenizer,
) -> None:
    """Writes a model for transformers, ONNX or safetensors, and prints how to read it.

    Args:
        task: Name of the task.
        net: The network.
        metadata: Of its data.
        target: Of `export_target`.
        format: hf: a folder with weights and config; onnx: what `write_onnx` writes, a file or in
            a folder; safetensors: a file.
        convert: See `Convert`; its `ValueError` says why Hugging Face has no such model.
        write_onnx: Writes a graph, and returns the code that runs it.
        write_more: Writes the other files of a folder, such as the tokenizer.
    """
    writers: dict[str, Callable[[Path], str]] = {
        "hf": lambda folder: write_huggingface(net, folder, convert, lambda: "onnx or safetensors"),
        "onnx": write_onnx,
        "safetensors": lambda file: write_safetensors(task, net, metadata, file),
    }
    # `export_target` has checked that only files have such a suffix.
    new = new_file if target.suffix in FILE_SUFFIXES else new_folder
    with new(target) as partial:
        hint = writers[format](partial)
        if partial.is_dir():
            write_more(metadata, partial)
    print(f"wrote {target}\n{hint.format(file=target)}")


class TextGraph(nn.Module):
    """A network from tokens to logits; `inputs` are the arguments of `forward`, all in `INPUTS`."""

    inputs: tuple[str, ...]

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net


class NextTokenGraph(TextGraph):
    """A language model, of text or of pixels."""

    inputs = ("input_ids",)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, N), padding on the right -> logits (B, N, V) of the token that follows each."""
        return self.net.logits(self.net(input_ids))


def write_text_graph(graph: TextGraph, metadata: dict[str, Any], folder: Path) -> str:
    """Writes `model.onnx`, of any batch size and length; returns the code that runs it.

    Raises `UsageError` if `max_length` is below 3: torch needs at least 3 for a dynamic axis.
    """
    longest = graph.net.config.max_length
    if longest < 3:
        raise UsageError(
            f"max_length of the model is {longest}, and a graph needs at least 3: use --format "
            "safetensors"
        )
    # Sizes of 1 would become constants of the graph.
    examples = {name: torch.ones(2, 2, dtype=torch.int64) for name in graph.inputs}
    axes = {name: {0: "batch", 1: INPUTS[name][0]} for name in graph.inputs}
    write_graph(graph.eval(), examples, axes, metadata, folder / "model.onnx")
    inputs = ", ".join(f"'{name}': {INPUTS[name][1]}" for name in graph.inputs)
    return (
        "run it with onnxruntime.InferenceSession('{file}/model.onnx')"
        f".run(None, {{{{{inputs}}}}})"
    )


def write_huggingface(net: Any, folder: Path, convert: Convert, others: Callable[[], str]) -> str:
    """Writes weights and `config.json`; returns the code that loads them.

    `others` gives the other formats of the network, for the message of an error.
    """
    try:
        settings, state = convert(net)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise UsageError(
            f"Hugging Face has no such model ({reason}): use --format {others()}"
        ) from error
    save_weights(state, folder / "model.safetensors", format="pt")
    write_text(folder / "config.json", json.dumps(settings, indent=2))
    return f"transformers.{settings['architectures'][0]}.from_pretrained('{{file}}')"


def save_tokenizer(
    content: dict[str, Any],
    tokenizer: Tokenizer,
    max_length: int,
    folder: Path,
    more: Mapping[str, Any] = {},
) -> None:
    """Writes a `tokenizer.json`, and beside it special tokens, longest input and truncation.

    `more` are other entries of `tokenizer_config.json`.
    """
    content.pop(
        "special_tokens", None
    )  # from the other files of a published tokenizer, written below
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        **truncation_settings(tokenizer.truncation),
        **more,
    }
    if tokenizer.truncation == "both":
        print("of texts that are too long, transformers keeps the head: it cannot keep both ends")
    for role, number in tokenizer.special_ids.known().items():
        settings[f"{role}_token"] = tokenizer.convert_ids_to_tokens([number])[0]
    write_text(folder / "tokenizer.json", json.dumps(content, ensure_ascii=False))
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2))


def set_special_tokens(
    content: dict[str, Any], tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]
) -> None:
    """Changes the content of a `tokenizer.json` to add tokens before and after a text."""
    names = {number: tokenizer.convert_ids_to_tokens([number])[0] for number in (*before, *after)}
    bos = [{"SpecialToken": {"id": names[number], "type_id": 0}} for number in before]
    eos = [{"SpecialToken": {"id": names[number], "type_id": 0}} for number in after]
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*bos, first, *eos],
        "pair": [*bos, first, second, *eos],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for number, name in names.items()
        },
    }


def write_safetensors(task: str, net: Any, metadata: dict[str, Any], path: Path) -> str:
    """Writes weights under our names, and in the header what `read_exported` needs.

    Returns how to read it.
    """
    header = {"config": json.dumps(asdict(net.config)), "metadata": json.dumps(metadata)}
    save_weights(net.state_dict(), path, task=task, version=str(VERSION), **header)
    return "load it with tessera.load('{file}'), or its tensors with safetensors.torch.load_file"


def save_weights(state: Mapping[str, Tensor], path: Path, **header: str) -> None:
    """Writes a safetensors file with the permissions of any new file; safetensors sets its own.

    Raises `OSError` where safetensors has its own error, as on a full disk.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: value.contiguous() for name, value in state.items()}, path, header)
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    path.chmod(mode)


@contextmanager
def made_parents(path: Path) -> Iterator[None]:
    """Creates the folders that a path lies in, and removes them again if what follows fails."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # something else is in it by now
                folder.rmdir()
        raise


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a file to write, which takes its name at the end; nothing is left if that fails."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give the name of a file to write")
    with made_parents(path), replacing(path) as partial:
        yield partial


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder to fill, which takes its name at the end; nothing is left if that fails."""
    exists = folder.is_symlink() or folder.exists()
    is_empty = folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    if exists and not (folder.name and is_empty):
        raise UsageError(exists_message(folder))
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    with made_parents(folder), errors_naming(folder, partial):
        partial.mkdir()
        try:
            yield partial
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
