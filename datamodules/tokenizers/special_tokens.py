"""Special tokens: their roles, their ids, and the names they have in tokenizers from elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Role: name, in the order of their ids 0 to 6 in every tokenizer trained here.
ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
SPECIAL_TOKENS = {role: f"[{role.upper()}]" for role in ROLES}
TITLES = {  # what error messages call them
    "pad": "padding",
    "unk": "unknown",
    "cls": "class",
    "sep": "separator",
    "mask": "mask",
    "bos": "start",
    "eos": "end",
}
# Names to try after ours: those of RoBERTa and BART, then of GPT-2. One token may have several
# roles there.
ALTERNATIVE_NAMES = {
    "pad": ("<pad>",),
    "unk": ("<unk>", "<|endoftext|>"),
    "cls": ("<s>",),
    "sep": ("</s>",),
    "mask": ("<mask>",),
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
}


@dataclass(frozen=True)
class SpecialTokenIds:
    """Ids of the special tokens; None if a tokenizer lacks one.

    [CLS] and [SEP] are around a text, [BOS] and [EOS] around a document or a decoder's output.
    """

    pad: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None

    def known(self) -> dict[str, int]:
        """Role: id, of those that the tokenizer has."""
        return {role: token_id for role, token_id in asdict(self).items() if token_id is not None}


@dataclass(frozen=True)
class BoundaryTokens:
    """Ids of the special tokens that mark documents; None: there is none.

    Args:
        prefix: Once, before the first document, if one token separates documents (as in GPT-2).
        bos, eos: Before and after each document.
    """

    prefix: int | None = None
    bos: int | None = None
    eos: int | None = None

    @classmethod
    def from_ids(cls, ids: SpecialTokenIds, added: Sequence[int]) -> "BoundaryTokens":
        """[BOS] document [EOS], or one token between documents if the tokenizer has only one.

        `added` are the tokens that the tokenizer's own template puts around a text. If [BOS] is
        among them, it begins a document even if it is [EOS], too; if there are none at all, as in
        Qwen, it does not.
        """
        single = ids.bos is None or ids.eos is None or ids.bos == ids.eos or not added
        if single and ids.bos not in added:
            separator = ids.bos if ids.eos is None else ids.eos
            return cls(prefix=separator, eos=separator)
        return cls(bos=ids.bos, eos=ids.eos)

    @property
    def first(self) -> int | None:
        """The token before the first document: a model that continues it writes a document."""
        return self.prefix if self.bos is None else self.bos


def find_special_tokens(vocab: Mapping[str, int], named: Mapping[str, str]) -> SpecialTokenIds:
    """Ids of the special tokens in a vocabulary (token: id).

    By the names in the tokenizer's files (role: token), else by names that are common.
    """
    found = {}
    for role, ours in SPECIAL_TOKENS.items():
        names = (named.get(role, ours), ours, *ALTERNATIVE_NAMES[role])
        found[role] = next((vocab[name] for name in names if name in vocab), None)
    return SpecialTokenIds(**found)


def named_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Role: token, from the content of a `tokenizer_config.json` or `special_tokens_map.json`."""
    named = {}
    for role in SPECIAL_TOKENS:
        token = settings.get(f"{role}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[role] = token
    return named
