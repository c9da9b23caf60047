"""Token numbers of many texts: computed once, kept in a token file that is named by what they were computed from."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain

import numpy as np

from datamodules.sources.documents import Documents, Piece
from datamodules.tokenizers import BoundaryTokens, Tokenizer
from datamodules.tokens.token_file import Part, TokenFile, write_tokens
from datamodules.utils.cache import Texts, cache_folder, content_key, text_digest, unwritable
from datamodules.utils.errors import DataError
from datamodules.utils.progress import progress_bar

LAYOUT = "3"  # of what is in the files; another number makes old ones unused
AT_ONCE = 2**18  # characters of a stream that each core is given at once


def tokenised(texts: Texts, tokenizer: Tokenizer, progress: bool = True) -> TokenFile:
    """The tokens of all texts, from the cache where the same texts were cut by the same tokenizer before.

    Args:
        texts: A list, or a string column of an Arrow table. Their bytes are not counted.
        tokenizer: What cuts them.
        progress: Show a bar on a terminal where there are many.

    Raises:
        UsageError: A text holds what is no character.
        DataError: The cache cannot be written.
    """

    def parts() -> Iterator[Part]:
        for lists in tokenizer.encode_chunks(texts, progress):
            sizes = np.array([len(ids) for ids in lists], np.int64)
            tokens = np.fromiter(chain.from_iterable(lists), np.uint32, sizes.sum())
            none = np.zeros_like(sizes)
            yield Part(tokens, sizes, none, np.ones(len(sizes), bool), none)

    return _kept(text_digest(texts), parts(), tokenizer)


def tokenised_documents(
    documents: Documents, tokenizer: Tokenizer, boundary: BoundaryTokens, title: str = "text"
) -> TokenFile:
    """The tokens of a stream of documents, from the cache where the same text was cut by the same tokenizer before.

    Args:
        documents: The text; of a document that it only has the beginning of, the end is not marked.
        tokenizer: What cuts it.
        boundary: Control tokens around each document.
        title: What to call the text on a progress bar.

    Raises:
        DataError: The cache cannot be written, or the text cannot be read, or was changed meanwhile.
    """

    def parts() -> Iterator[Part]:
        with progress_bar(
            f"tokenising {title}, characters", documents.characters, least=20_000_000
        ) as advance:
            yield from _framed(documents, tokenizer, boundary, advance)

    return _kept(content_key(documents.digest, repr(boundary)), parts(), tokenizer)


def _kept(content: str, parts: Iterable[Part], tokenizer: Tokenizer) -> TokenFile:
    """The file that is named by its content; written if there is none, or if it is damaged."""
    from tokenizers import __version__

    path = (
        cache_folder("tokens")
        / f"{content_key(LAYOUT, __version__, tokenizer.digest, content)}.tokens"
    )
    if path.is_file():
        with suppress(DataError):  # damaged: written anew
            return TokenFile(path)
    ids = tokenizer.special_ids
    unknown = None if ids.unk in (ids.bos, ids.eos) else ids.unk  # GPT-2 has one token for all
    try:
        write_tokens(path, parts, tokenizer.vocab_size, unknown)
    except OSError as error:
        raise unwritable(path, error) from error
    return TokenFile(path)


def _framed(
    documents: Documents,
    tokenizer: Tokenizer,
    boundary: BoundaryTokens,
    advance: Callable[[int], None],
) -> Iterator[Part]:
    """The tokens of a few pieces at a time, with control tokens around each document."""
    if boundary.prefix is not None:
        one = np.ones(1, np.int64)
        yield Part(one * boundary.prefix, one, one * 0, one < 0, one * 0)
    characters = 0
    for pieces in _few(documents):
        texts = [piece.text for piece in pieces]
        tokens, sizes = tokenizer.encode_concatenated(texts)
        opens, closes = (
            np.array([getattr(piece, name) for piece in pieces]) for name in ("opens", "closes")
        )
        bare = opens & (boundary.first is None)  # then nothing foresees the first token
        first = np.array(
            [
                tokenizer.first_token_bytes(text) if alone else 0
                for text, alone in zip(texts, bare, strict=True)
            ]
        )
        ends, places, controls = sizes.cumsum(), [], []
        for control, where, at in (
            (boundary.eos, closes, ends),
            (boundary.bos, opens, ends - sizes),
        ):
            if control is not None:
                places.append(at[where])
                controls.append(np.full(int(where.sum()), control))
                sizes = sizes + where
        if (
            places
        ):  # at the same place a tail comes before a head: the order of equal places is kept
            tokens = np.insert(tokens, np.concatenate(places), np.concatenate(controls))
        bytes_ = np.array([len(text.encode()) for text in texts], np.int64)
        yield Part(tokens, sizes, bytes_, opens, first)
        size = sum(map(len, texts))
        characters += size
        advance(size)
    if characters != documents.characters:
        raise DataError("the text was changed while it was read: start again when it is complete.")


def _few(documents: Documents) -> Iterator[list[Piece]]:
    """As many pieces as are tokenised at once."""
    few, characters, most = list[Piece](), 0, AT_ONCE * (os.cpu_count() or 1)
    for piece in documents:
        few.append(piece)
        characters += len(piece.text)
        if characters >= most:
            yield few
            few, characters = [], 0
    if few:
        yield few
