#!/usr/bin/env python3
"""Merge what the hosts of a job have computed into one file of each array.

    python scripts/merge_parts.py MODEL... --output FOLDER

MODEL is a model.tar.gz, local or s3://BUCKET/KEY, or a folder of parts. The parts must have all rows exactly once, and
be of one source and one kind of settings; a gap, an overlap, a part of something else or a damaged one is an error that
names it, and nothing is left of the output. Parts of hosts with files of their own (ShardedByS3Key) come host by host;
manifest.json says which rows are those of which file.
"""

import argparse
import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from job_parts import manifests, opened

from app.files import json_text
from app.parts import HEADER, header

PIECE = 2**24  # bytes that are copied at a time; a multiple of every item's size


def ordered(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts in the order of their rows; ValueError if they are not the whole of one thing."""
    first = parts[0]
    sharded = first["total"] is None
    for part in parts:
        for key in ("settings", "total") if sharded else ("settings", "total", "source"):
            if part[key] != first[key]:
                raise ValueError(
                    f"{_name(part)} is of another {key}: {part[key]}, and {_name(first)} has {first[key]}; merge "
                    "parts of one job"
                )
    return _by_host(parts) if sharded else _by_row(parts, first["total"])


def _by_row(parts: list[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    found = sorted(parts, key=lambda part: part["rows"])
    reached, before = 0, None
    for part in found:
        start, stop = part["rows"]
        if start > reached:
            raise ValueError(f"rows {reached} to {start - 1} are in no part; give the part that has them")
        if start < reached:
            raise ValueError(f"rows {start} to {min(stop, reached) - 1} are in both {_name(before)} and {_name(part)}")
        reached, before = stop, part if stop > start else before
    if reached != total:
        raise ValueError(f"rows {reached} to {total - 1} are in no part; give the part that has them")
    return found


def _by_host(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {}
    for part in parts:
        if part["host"] in found:
            raise ValueError(f"{_name(found[part['host']])} and {_name(part)} are both of {part['host']}")
        found[part["host"]] = part
    owner: dict[str, dict] = {}
    for part in parts:
        for file in part["files"]:
            if file in owner:
                raise ValueError(f"{file} is in both {_name(owner[file])} and {_name(part)}")
            owner[file] = part
    if missing := [host for host in parts[0]["hosts"] if host not in found]:
        raise ValueError(f"the part of {missing[0]} is missing; give the one that has its files")
    return [found[host] for host in parts[0]["hosts"]]


def merge(names: list[str], output: Path) -> dict[str, Any]:
    """Write the merged arrays and manifest.json into `output`, and return the latter."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as aside, contextlib.ExitStack() as stack:
        models = [opened(name, Path(aside)) for name in names]
        parts = ordered(manifests(models))
        plan = _plan(parts)
        files = {}
        for name, (kind, _) in plan.items():
            files[name] = stack.enter_context(Path(aside, f"{name}.npy").open("wb"))
            files[name].write(header(np.dtype(kind["dtype"]), tuple(kind["shape"])))
        left = {(part["model"], array["file"]) for part in parts for array in part["arrays"].values()}
        for model in models:
            for file_name, content in model.files():
                if (model.name, file_name) not in left:
                    continue
                for part in parts:
                    for name, array in part["arrays"].items():
                        if part["model"] == model.name and array["file"] == file_name:
                            _copy(content, files[name], plan[name][1][id(part)], part, name, _offset(parts, part, name))
                left.discard((model.name, file_name))
        if left:
            raise ValueError(f"{sorted(left)[0][0]}: {sorted(left)[0][1]} is missing, which its manifest names")
        about = _about(parts, plan)
        for name, file in files.items():
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, output / f"{name}.npy")
        (output / "manifest.json").write_text(json_text(about, indent=1))
    return about


def _plan(parts: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[int, int]]]:
    """Return of each array its dtype and shape, and at which entry each part's begins."""
    found: dict[str, tuple[dict[str, Any], dict[int, int]]] = {}
    for part in parts:
        for name, array in part["arrays"].items():
            kind, begins = found.setdefault(name, ({"dtype": array["dtype"], "shape": [0, *array["shape"][1:]]}, {}))
            if (array["dtype"], array["shape"][1:]) != (kind["dtype"], kind["shape"][1:]):
                raise ValueError(
                    f"{_name(part)}: {name} is {array['dtype']} {array['shape'][1:]} a row, others have "
                    f"{kind['dtype']} {kind['shape'][1:]}"
                )
            begins[id(part)] = kind["shape"][0]
            kind["shape"][0] += array["shape"][0]
    return found


def _offset(parts: list[dict[str, Any]], part: dict[str, Any], name: str) -> int:
    """Return what is added to the numbers of an array: of rows that a host numbers from 0, the rows before its own."""
    if part["total"] is not None or name not in part["settings"].get("numbers", ()):
        return 0
    return sum(other["rows"][1] for other in parts[: parts.index(part)])


def _copy(content: BinaryIO, file: BinaryIO, entry: int, part: dict[str, Any], name: str, offset: int) -> None:
    """Copy an array's rows to their place; ValueError if they are not what the manifest says."""
    array = part["arrays"][name]
    dtype, shape = np.dtype(array["dtype"]), tuple(array["shape"])
    where = f"{part['model']}: {array['file']}"
    if content.read(HEADER) != header(dtype, shape):
        raise ValueError(f"{where} is not {dtype} {list(shape)}, as its manifest says; copy it again")
    size = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    file.seek(HEADER + entry * size)
    digest, left = hashlib.blake2b(digest_size=16), shape[0] * size
    while left and (piece := content.read(min(PIECE, left))):
        digest.update(piece)
        left -= len(piece)
        file.write((np.frombuffer(piece, dtype) + offset).astype(dtype).tobytes() if offset else piece)
    if left or content.read(1) or digest.hexdigest() != array["blake2b"]:
        raise ValueError(f"{where} is damaged: its checksum is another; copy it again")


def _about(parts: list[dict[str, Any]], plan: dict[str, Any]) -> dict[str, Any]:
    found, first = {}, 0
    for part in parts if parts[0]["total"] is None else parts[:1]:
        for name, rows in sorted(part["files"].items()):
            found[name] = [first, first + rows]
            first += rows
    about = {"rows": first, "files": found, "settings": parts[0]["settings"]}
    return about | {"arrays": {name: kind for name, (kind, _) in plan.items()}}


def _name(part: dict[str, Any]) -> str:
    return f"{part['model']} (rows {part['rows'][0]} to {part['rows'][1] - 1})"


def main() -> None:
    """Do as the command line says."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="+", metavar="MODEL")
    made.add_argument("--output", type=Path, required=True, help="folder of the merged files")
    given = made.parse_args()
    try:
        about = merge(given.models, given.output)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for name, kind in about["arrays"].items():
        print(f"{given.output / name}.npy: {np.dtype(kind['dtype'])} {kind['shape']}")


if __name__ == "__main__":
    main()
