"""W&B's files are read wherever their blocks of 32 KiB part an entry."""

import struct
import zlib

import pytest

from tasks.tracking.wandb_files import BLOCK, entries


def written(content: list[bytes]) -> bytes:
    """A file with these entries, in LevelDB's log format: whole (1), or first (2), middle (3) and last (4) parts."""
    data = b":W&B..."
    for entry in content:
        begun = False
        while entry or not begun:
            if (room := BLOCK - len(data) % BLOCK) < 7:
                data += bytes(room)
                continue
            part, entry = entry[: room - 7], entry[room - 7 :]
            kind = (3 if entry else 4) if begun else (2 if entry else 1)
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            begun = True
    return data


@pytest.mark.parametrize("left", range(10))
def test_entries_at_the_end_of_a_block(left: int) -> None:
    """So many bytes of the first block are left when the second entry begins."""
    content = [b"a" * (BLOCK - 7 - 7 - left), b"b" * 70_000, b"c"]
    data = written(content)
    assert list(entries(data)) == content
    assert list(entries(data[:-1])) == content[:2]  # as it is being written
    assert list(entries(data[:40_000])) == content[:1]
