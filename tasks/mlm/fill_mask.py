"""`python -m tasks.mlm fill_mask`: the likeliest tokens for the masks of a text."""

from dataclasses import dataclass, field

from tessera.loading import find
from tessera.texts import MaskedLanguageModel

from modules.config import require
from tasks.cli.text_io import json_line, printing_to, read_input_lines
from tasks.errors import UsageError, usage_errors
from tasks.inference import InferenceOptions, prepare_net


@dataclass(frozen=True, kw_only=True)
class FillOptions(InferenceOptions):
    """Print the likeliest tokens for each mask of a text.

    Args:
        text: Text with [MASK], or the model's own mask token, where a token is to be; may be given
            several times.
        input: File with a text on each line; - is standard input.
        output: File for what is printed; null: standard output.
        top_k: Tokens for each mask.
        json: Print one JSON object per line for each text: text, and masks with the token,
            probability and whole text of each.
    """

    text: list[str] = field(default_factory=list)
    input: str | None = None
    output: str | None = None
    top_k: int = 5
    json: bool = False

    def __post_init__(self) -> None:
        require(self.top_k >= 1, f"top_k is {self.top_k}; it must be at least 1.")


def fill_mask(options: FillOptions) -> None:
    """Print the likeliest tokens for each mask of a text, with their probabilities."""
    texts = read_texts(options)
    model = find(options.ckpt_path, "--ckpt_path")
    if not isinstance(model, MaskedLanguageModel):
        kind = type(model).__name__
        raise UsageError(
            f"--ckpt_path {options.ckpt_path} is of class {kind}, not MaskedLanguageModel: give a "
            "model that `python -m tasks.mlm fit` trained"
        )
    prepare_net(model.net, options.device, options.quantize)
    with printing_to(options.output):
        for name, text in texts:
            with usage_errors(name):
                masks = model.fill_mask(text, options.top_k)
            if options.json:
                entries = [[one._asdict() for one in mask] for mask in masks]
                print(json_line({"text": text, "masks": entries}))
                continue
            print(text)
            for number, mask in enumerate(masks, 1):
                if len(masks) > 1:
                    print(f"mask {number}")
                width = max(len(one.token) for one in mask)
                for one in mask:
                    print(f"  {one.token:<{width}}  {one.probability:.4f}")


def read_texts(options: FillOptions) -> list[tuple[str, str]]:
    """The texts of the command line and the file, each after what to call it in messages."""
    count = len(options.text)
    names = ["--text"] if count == 1 else [f"--text {i} of {count}" for i in range(1, count + 1)]
    texts = [*zip(names, options.text, strict=True)]
    if options.input is not None:
        lines = read_input_lines(options.input, "--input", "texts")
        named = ((f"--input {options.input}, line {i}", line) for i, line in enumerate(lines, 1))
        texts += [(name, line) for name, line in named if line.strip()]
    if not texts:
        raise UsageError("there is no text: give one with --text, or a file of texts with --input")
    return texts
