"""`python -m tasks.bert tokenize`: the tokens of a text."""

from collections.abc import Collection

from datamodules.embedded.reviews import generate
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.cli.config_files import read_config
from tasks.errors import UsageError

DEFAULT = TokenizerConfig(**read_config("configs/bert/reviews.yaml")["data"]["tokenizer"])


def tokenize(
    text: str,
    ckpt_path: str | None = None,
    tokenizer: TokenizerConfig = DEFAULT,
    max_length: int | None = None,
    typed: Collection[str] = (),
) -> None:
    """Show the tokens of a text and their ids.

    Args:
        text: The text.
        ckpt_path: Checkpoint that `fit` wrote, whose tokenizer is shown; null takes `tokenizer`.
        tokenizer: The one to use: a file, or a kind that is trained on the embedded reviews; by
            default that of the default run.
        max_length: Cut to so many tokens, the special tokens among them; null does not cut.
        typed: The options that the user named.

    Raises:
        UsageError: There is nothing to show or no room for it, or `tokenizer` is named beside a
            checkpoint.
    """
    if not text.strip():
        raise UsageError("--text is empty: give a text to cut into tokens")
    if max_length is not None and max_length < 3:
        raise UsageError(
            f"--max_length {max_length} leaves no room for text between special tokens: give 3 at "
            "least"
        )
    if ckpt_path is None:
        chosen = Tokenizer.load_or_train(generate()["train"][0], tokenizer)
    else:
        metadata = read_checkpoint(ckpt_path)[KEY]["metadata"]
        if "tokenizer" not in metadata:
            raise UsageError(f"checkpoint '{ckpt_path}' has no tokenizer: give one of a text task")
        if surplus := next((name for name in typed if name.startswith("--tokenizer")), None):
            raise UsageError(
                f"{surplus} cannot go with --ckpt_path: the checkpoint has its tokenizer, so leave "
                "it out"
            )
        chosen = Tokenizer.from_json(
            metadata["tokenizer"], metadata["tokenizer_options"]["truncate"]
        )
    (found,) = chosen.encode_batch([text])
    ids, _, was_cut = chosen.build_inputs(
        found, max_length or len(found) + chosen.num_special_tokens()
    )
    width = max(map(len, chosen.convert_ids_to_tokens(ids)))
    for token, number in zip(chosen.convert_ids_to_tokens(ids), ids, strict=True):
        print(f"{token:<{width}}  {number}")
    cut = f", cut from {len(found) + chosen.num_special_tokens()}" if was_cut else ""
    print(f"{len(ids)} tokens{cut}; vocabulary {chosen.vocab_size}")
