"""Token numbers of many texts: computed once, kept as an Arrow file, mapped into memory when read."""

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.cache import CHUNK, Texts, cache_folder, content_key, text_digest, unwritable
from datamodules.errors import DataError
from datamodules.files import replacing
from datamodules.progress import progress_bar
from datamodules.sources.documents import Documents, Piece
from datamodules.token_file import Part, TokenFile, write_tokens
from datamodules.tokenizers import ControlIds, Tokenizer

LAYOUT = "1"  # of the files; another number makes old ones unused
AT_ONCE = 2**18  # characters of a stream that each core is given at once
SMALL = 2**16  # vocabularies up to this size are kept in 16 bits a token


class TokenTable:
    """Token numbers of S texts: `table[i]` is those of text i, without control tokens, as a view of the file.

    Args:
        path: A file that `tokenised` wrote.

    Attributes:
        offsets: int64 (S + 1,): text i has the tokens from `offsets[i]` to `offsets[i + 1]`.
        lengths: int64 (S,), tokens of each text.

    Raises:
        DataError: The file is not whole, or not as it was written.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np
        import pyarrow as pa

        self.path = path
        self._chunks: list[tuple[Any, Any]] = []  # of each chunk: where its texts begin, and their tokens
        lengths = [np.empty(0, np.int64)]
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            for number in range(reader.num_record_batches):
                batch, notes = reader.get_batch_with_custom_metadata(number)
                starts, tokens = (part.to_numpy() for part in (batch.column(0).offsets, batch.column(0).values))
                if notes["checksum"] != _checksum(starts, tokens) or (lengths[-1].size not in (0, CHUNK)):
                    raise ValueError("a checksum is wrong")
                self._chunks.append((starts, tokens))
                lengths.append(np.diff(starts))
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path} is damaged ({error}): delete it.") from error
        self.lengths: Tensor = torch.from_numpy(np.concatenate(lengths))
        self.offsets: Tensor = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Any:
        """Tokens of text i: numpy, uint16 or int32 (length,), read-only.

        Raises:
            IndexError: There is no such text.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"text {i} of {len(self)}")
        starts, tokens = self._chunks[i // CHUNK]
        return tokens[starts[i % CHUNK] : starts[i % CHUNK + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTable, (self.path,)


def tokenised(texts: Texts, tokenizer: Tokenizer, progress: bool = True) -> TokenTable:
    """The tokens of all texts, from the cache where the same texts were cut by the same tokenizer before.

    Args:
        texts: A list, or a string column of an Arrow table.
        tokenizer: What cuts them.
        progress: Show a bar on a terminal where there are many.

    Raises:
        UsageError: A text holds what is no character.
        DataError: The cache cannot be written.
    """
    from tokenizers import __version__

    key = content_key(LAYOUT, __version__, tokenizer.digest, text_digest(texts))
    path = cache_folder("tokens") / f"{key}.arrow"
    if path.is_file():
        try:
            return TokenTable(path)
        except DataError:  # damaged: written anew
            pass
    try:
        with replacing(path) as partial:
            _write(partial, texts, tokenizer, progress)
    except OSError as error:
        raise unwritable(path, error) from error
    return TokenTable(path)


def _write(path: Path, texts: Texts, tokenizer: Tokenizer, progress: bool) -> None:
    """One record batch for each chunk of texts, with its checksum; never more than a chunk is in memory."""
    import numpy as np
    import pyarrow as pa

    kind = np.uint16 if tokenizer.size <= SMALL else np.int32
    schema = pa.schema([("tokens", pa.large_list(pa.from_numpy_dtype(kind)))])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for lists in tokenizer.encode_chunks(texts, progress):
            starts = np.zeros(len(lists) + 1, np.int64)
            np.cumsum([len(ids) for ids in lists], out=starts[1:])
            tokens = np.fromiter(chain.from_iterable(lists), kind, starts[-1])
            column = pa.LargeListArray.from_arrays(pa.array(starts), pa.array(tokens))
            notes = {"checksum": _checksum(starts, tokens)}
            writer.write_batch(pa.record_batch([column], schema=schema), custom_metadata=notes)


def _checksum(starts: Any, tokens: Any) -> bytes:
    return b"%08x" % zlib.crc32(tokens, zlib.crc32(starts))


@dataclass(frozen=True)
class Frame:
    """Control tokens around each document.

    Args:
        lead: Before the first document, where documents are parted by one token (GPT-2's).
        head, tail: Before and after each document.
    """

    lead: int | None = None
    head: int | None = None
    tail: int | None = None

    @classmethod
    def of(cls, ids: ControlIds) -> "Frame":
        """[BOS] document [EOS]; where the tokenizer has but one of them, or one for both, that between documents."""
        first, last = ids.bos, ids.eos
        if first is None or last is None or first == last:
            only = last if first is None else first
            return cls(lead=only, tail=only)
        return cls(head=first, tail=last)


def tokenised_documents(documents: Documents, tokenizer: Tokenizer, frame: Frame, title: str = "text") -> TokenFile:
    """The tokens of a stream of documents, from the cache where the same text was cut by the same tokenizer before.

    Args:
        documents: The text; of a document that it only has the beginning of, the end is not marked.
        tokenizer: What cuts it.
        frame: Control tokens around each document.
        title: What to call the text on a progress bar.

    Raises:
        DataError: The cache cannot be written, or a text cannot be read.
    """
    from tokenizers import __version__

    key = content_key(LAYOUT, __version__, tokenizer.digest, repr(frame), documents.digest)
    path = cache_folder("tokens") / f"{key}.tokens"
    if path.is_file():
        try:
            return TokenFile(path)
        except DataError:  # damaged: written anew
            pass
    try:
        with progress_bar(f"tokenising {title}, characters", documents.characters, least=20_000_000) as advance:
            parts = _framed(documents, tokenizer, frame, advance)
            write_tokens(path, parts, tokenizer.size, tokenizer.ids.unk)
    except OSError as error:
        raise unwritable(path, error) from error
    return TokenFile(path)


def _framed(documents: Documents, tokenizer: Tokenizer, frame: Frame, advance: Callable[[int], None]) -> Iterator[Part]:
    """The tokens of a few pieces at a time, with control tokens around each document."""
    if frame.lead is not None:
        one = np.array([frame.lead])
        yield Part(one, np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros(1, bool))
    for pieces in _few(documents):
        texts = [piece.text for piece in pieces]
        tokens, sizes = tokenizer.encode_joined(texts)
        opens, closes = (np.array([getattr(piece, name) for piece in pieces]) for name in ("opens", "closes"))
        ends, places, controls = sizes.cumsum(), [], []
        for control, where, at in ((frame.tail, closes, ends), (frame.head, opens, ends - sizes)):
            if control is not None:
                places.append(at[where])
                controls.append(np.full(int(where.sum()), control))
                sizes = sizes + where
        if places:  # at the same place a tail comes before a head: the order of equal places is kept
            tokens = np.insert(tokens, np.concatenate(places), np.concatenate(controls))
        yield Part(tokens, sizes, np.array([len(text.encode()) for text in texts], np.int64), opens)
        advance(sum(map(len, texts)))


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
