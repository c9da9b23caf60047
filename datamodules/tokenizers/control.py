"""Control tokens: their roles, their numbers, and the names they have in tokenizers that others trained."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Role: name, in the order of their numbers 0 to 6 in every tokenizer trained here.
CONTROL = {
    "pad": "[PAD]",
    "unk": "[UNK]",
    "cls": "[CLS]",
    "sep": "[SEP]",
    "mask": "[MASK]",
    "bos": "[BOS]",
    "eos": "[EOS]",
}
# Names after ours: RoBERTa's and BART's, then GPT-2's; a token may have several roles there.
OTHER_NAMES = {
    "pad": ("<pad>",),
    "unk": ("<unk>", "<|endoftext|>"),
    "cls": ("<s>",),
    "sep": ("</s>",),
    "mask": ("<mask>",),
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
}


@dataclass(frozen=True)
class ControlIds:
    """Numbers of the control tokens; None where a tokenizer lacks one.

    Args:
        pad: Fills a batch up.
        unk: Stands for what the vocabulary lacks.
        cls, sep: Before a text, and after it.
        mask: Hides a token in masked pretraining.
        bos, eos: Begin and end what a decoder writes.
    """

    pad: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None

    def known(self) -> dict[str, int]:
        """Role: number, of those that there are."""
        return {role: number for role, number in asdict(self).items() if number is not None}


@dataclass(frozen=True)
class Frame:
    """Control tokens that mark where a document begins and ends; None: there is none.

    Args:
        lead: Before the first document, where documents are parted by one token (GPT-2's).
        head, tail: Before and after each document.
    """

    lead: int | None = None
    head: int | None = None
    tail: int | None = None

    @classmethod
    def of(cls, ids: ControlIds, around: Sequence[int]) -> "Frame":
        """[BOS] document [EOS]; or one token between documents, where the tokenizer has but one of them.

        Args:
            ids: The control tokens.
            around: Those that the tokenizer itself puts around a text. [BOS] among them does begin a document, even if
                it is [EOS], too; where there are none at all, as in Qwen's, it does not.
        """
        alone = ids.bos is None or ids.eos is None or ids.bos == ids.eos or not around
        if alone and ids.bos not in around:
            only = ids.bos if ids.eos is None else ids.eos
            return cls(lead=only, tail=only)
        return cls(head=ids.bos, tail=ids.eos)

    @property
    def first(self) -> int | None:
        """What a document begins with; a model that goes on from it writes one from its beginning."""
        return self.lead if self.head is None else self.head


def find_control(vocabulary: Mapping[str, int], named: Mapping[str, str]) -> ControlIds:
    """Numbers of the control tokens in a vocabulary (token: number).

    Args:
        vocabulary: All tokens.
        named: Role: token, where the tokenizer's files say so; else the known names are looked for.
    """
    found = {}
    for role, ours in CONTROL.items():
        names = (named.get(role, ours), ours, *OTHER_NAMES[role])
        found[role] = next((vocabulary[name] for name in names if name in vocabulary), None)
    return ControlIds(**found)


def named_roles(settings: Mapping[str, Any]) -> dict[str, str]:
    """Role: token, from the content of a `tokenizer_config.json` or `special_tokens_map.json`."""
    roles = {}
    for role in CONTROL:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            roles[role] = token
    return roles
