"""`python -m tasks.bert tokenize`: how a text is cut into tokens."""

from datamodules.embedded.reviews import generate
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from tasks.checkpoints import KEY, read_checkpoint
from tasks.errors import UsageError


def tokenize(
    text: str,
    ckpt_path: str | None = None,
    tokenizer: TokenizerConfig = TokenizerConfig(),
    max_length: int | None = None,
) -> None:
    """Show the tokens of a text and their numbers.

    Args:
        text: The text.
        ckpt_path: Checkpoint that `fit` wrote, whose tokenizer is shown; null takes `tokenizer`.
        tokenizer: The one to use: a file, or a kind that is trained on the embedded reviews.
        max_length: Cut to so many tokens, the control tokens among them; null does not cut.
    """
    if not text.strip():
        raise UsageError("--text is empty: give a text to cut into tokens")
    if max_length is not None and max_length < 3:
        raise UsageError(f"--max_length {max_length} leaves no room for text between control tokens: give 3 at least")
    if ckpt_path is None:
        chosen = Tokenizer.for_texts(generate()["train"][0], tokenizer)
    else:
        facts = read_checkpoint(ckpt_path)[KEY]["facts"]
        if "tokenizer" not in facts:
            raise UsageError(f"checkpoint '{ckpt_path}' has no tokenizer: give one of a text task")
        chosen = Tokenizer.from_json(facts["tokenizer"], tokenizer.truncate)
    (found,) = chosen.encode_batch([text])
    ids, _, was_cut = chosen.build(found, max_length or len(found) + chosen.added())
    width = max(map(len, chosen.tokens(ids)))
    for token, number in zip(chosen.tokens(ids), ids, strict=True):
        print(f"{token:<{width}}  {number}")
    cut = f", cut from {len(found) + chosen.added()}" if was_cut else ""
    print(f"{len(ids)} tokens{cut}; vocabulary {chosen.size}")
