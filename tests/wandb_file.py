"""Prints the rows of files of W&B, one in a line, as JSON.

    python wandb_file.py FILE...

A file is a log as LevelDB writes it: a header of 7 bytes, and blocks of 32 KiB with pieces of
records. A piece is its checksum (4 bytes), its length (2), whether the record begins or ends with
it (1), and its bytes.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 2**15
PIECE = struct.Struct("<IHB")
WHOLE, FIRST, _, LAST = 1, 2, 3, 4


def records(content: bytes) -> Iterator[Record]:
    """Yield the records of a file; the last may be incomplete, and is left out."""
    position, record = 7, b""
    while position + PIECE.size <= len(content):
        _, length, kind = PIECE.unpack_from(content, position)
        end = position + PIECE.size + length
        if kind == 0 or end > len(content):
            return
        record = (b"" if kind in (WHOLE, FIRST) else record) + content[position + PIECE.size : end]
        if kind in (WHOLE, LAST):
            yield Record.FromString(record)
        left = BLOCK - end % BLOCK
        position = end + (left if left < PIECE.size else 0)


for name in sys.argv[1:]:
    for one in records(Path(name).read_bytes()):
        if one.WhichOneof("record_type") == "history":
            items = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in one.history.item
            }
            print(json.dumps(items))
