"""`python -m tasks.bert tokenize`: the tokens of a text."""

from collections.abc import Collection

from datamodules.embedded.reviews import generate
from datamodules.tokenizers import Tokenizer, TokenizerConfig, truncation
from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.cli.config_files import read_config
from tasks.errors import UsageError
from tasks.tracking.report import format_count

DEFAULT = TokenizerConfig(**read_config("configs/bert/reviews.yaml")["data"]["tokenizer"])


def tokenize(
    text: str,
    ckpt_path: str | None = None,
    tokenizer: TokenizerConfig = DEFAULT,
    max_length: int | None = None,
    merges: bool = False,
    on_command_line: Collection[str] = (),
) -> None:
    """Show the tokens of a text and their ids.

    Args:
        text: The text.
        ckpt_path: Checkpoint that `fit` wrote, whose tokenizer is used; null: `tokenizer`.
        tokenizer: A file, or a kind that is trained on the embedded reviews; by default that of the
            default run.
        max_length: Truncate to this many tokens, special tokens included; null: do not truncate.
        merges: Show first which pairs BPE merges in the text, one line each.
        on_command_line: Names of the options on the command line.
    """
    if not text.strip():
        raise UsageError("--text is empty: give a text to tokenize")
    if max_length is not None and max_length < 3:
        raise UsageError(f"--max_length {max_length} leaves room for no token: give at least 3")
    if ckpt_path is None:
        chosen = Tokenizer.load_or_train(generate()["train"][0], tokenizer)
    else:
        metadata = read_checkpoint(ckpt_path)[KEY]["metadata"]
        if "source_tokenizer" in metadata:
            raise UsageError(
                f"checkpoint '{ckpt_path}' has tokenizers for a source and a target: give "
                "--tokenizer.file with one that its run folder has"
            )
        if "tokenizer" not in metadata:
            raise UsageError(f"checkpoint '{ckpt_path}' has no tokenizer: give one of a text task")
        for name in on_command_line:
            if name.startswith("--tokenizer"):
                raise UsageError(f"{name} and --ckpt_path both name a tokenizer: leave one out")
        chosen = Tokenizer.from_json(
            metadata["tokenizer"], metadata["tokenizer_options"]["truncate"]
        )
    if merges:
        for pair, pieces in chosen.bpe_merges(text):
            print(f"{' + '.join(pair) if pair else 'bytes':<16}  {' '.join(pieces)}")
        print()
    (all_ids,) = chosen.encode_batch([text])
    length = len(all_ids) + chosen.num_special_tokens()
    ids, _, truncated = chosen.build_inputs(all_ids, max_length or length)
    tokens = chosen.convert_ids_to_tokens(ids)
    width = max(map(len, tokens))
    for token, token_id in zip(tokens, ids, strict=True):
        print(f"{token:<{width}}  {token_id}")
    print(f"{format_count(len(ids), 'token')}; vocabulary {chosen.vocab_size}")
    if truncated:
        print(truncation(f"{length} tokens", len(ids), chosen.truncation))
