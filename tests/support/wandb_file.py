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

BLOCK_BYTES = 2**15
FRAGMENT_HEADER = struct.Struct("<IHB")
WHOLE, FIRST, _, LAST = 1, 2, 3, 4


def records(content: bytes) -> Iterator[Record]:
    """Yield the records of a file; the last may be incomplete, and is left out."""
    position = 7
    record = b""
    while position + FRAGMENT_HEADER.size <= len(content):
        _, length, fragment = FRAGMENT_HEADER.unpack_from(content, position)
        fragment_end = position + FRAGMENT_HEADER.size + length
        if fragment == 0 or fragment_end > len(content):
            return
        record = (b"" if fragment in (WHOLE, FIRST) else record) + content[
            position + FRAGMENT_HEADER.size : fragment_end
        ]
        if fragment in (WHOLE, LAST):
            yield Record.FromString(record)
        bytes_left_in_block = BLOCK_BYTES - fragment_end % BLOCK_BYTES
        position = fragment_end + (
            bytes_left_in_block if bytes_left_in_block < FRAGMENT_HEADER.size else 0
        )


for name in sys.argv[1:]:
    for record in records(Path(name).read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            print(json.dumps(items))
