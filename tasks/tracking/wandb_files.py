"""Reading the files that W&B writes."""

import json
import struct
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from datamodules.utils.files import read_bytes

HEADER = struct.Struct("<IHB")  # of a part of an entry of a .wandb file: checksum, length, kind
BLOCK, WHOLE, LAST = 32768, 1, 4


def history(folder: Path, identity: str) -> Iterator[dict[str, Any]]:
    """The rows of a run in the .wandb files below a folder, in order: values by name."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")
    for path in sorted(folder.glob(f"wandb/*run-*-{identity}/run-{identity}.wandb")):
        for entry in entries(read_bytes(path)):
            items = protocol.Record.FromString(entry).history.item
            if items:
                yield {
                    item.key or item.nested_key[0]: json.loads(item.value_json) for item in items
                }


def entries(data: bytes) -> Iterator[bytes]:
    """The entries of a .wandb file: LevelDB's log format, blocks of 32 KiB; up to one that is damaged or cut."""
    place, entry = 7, b""  # after W&B's own header
    while place + HEADER.size <= len(data):
        if (
            BLOCK - place % BLOCK < HEADER.size
        ):  # too short for another part: the rest of the block is empty
            place += BLOCK - place % BLOCK
            continue
        checksum, length, kind = HEADER.unpack_from(data, place)
        place += HEADER.size
        part = data[place : place + length]
        if zlib.crc32(bytes([kind]) + part) != checksum:
            return
        entry += part
        place += length
        if kind in (WHOLE, LAST):
            yield entry
            entry = b""
