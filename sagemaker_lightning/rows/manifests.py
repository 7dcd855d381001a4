"""Reads the manifests of a job's parts as untrusted input, and orders the parts."""

import json
from fnmatch import fnmatchcase
from typing import Any, BinaryIO

import numpy as np

from sagemaker_lightning.rows.archives import Model
from sagemaker_lightning.rows.parts import DTYPE_TEXT, check_name, header, plain

# Bytes of one manifest; a manifest gets there with 100,000 input files.
MAX_MANIFEST_BYTES = 2**24
MAX_ALL_MANIFEST_BYTES = 2**28
# Arrays of a part; all of them are open at the same time.
MAX_ARRAYS = 100
# How deeply lists and objects may be nested in a manifest.
MAX_DEPTH = 20
# The largest number of rows, and of bytes of an array.
LARGEST_NUMBER = 2**60
KEY_TYPES: dict[str, list[type]] = {
    "rows": [list],
    "arrays": [dict],
    "source": [str],
    "settings": [dict],
    "files": [dict],
    "hosts": [list],
}
KEY_TYPES |= {"host": [str], "total": [int, type(None)]}


def manifests(models: list[Model]) -> list[dict[str, Any]]:
    """Return the manifests of all parts, checked, each with the name of its MODEL.

    Raises ValueError if a manifest is damaged or a MODEL has none.
    """
    checked: list[dict[str, Any]] = []
    bytes_left = MAX_ALL_MANIFEST_BYTES
    for model in models:
        count_before = len(checked)
        for name, file in model.files():
            if fnmatchcase(name, "manifest-*.json"):
                try:
                    text = _read_limited(file, min(bytes_left, MAX_MANIFEST_BYTES))
                    manifest = json.loads(text, parse_constant=_refuse_constant)
                    _check_manifest(manifest)
                # RecursionError: the JSON is nested too deeply.
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{model.name}: {name} is damaged ({error}); copy it again"
                    ) from None
                checked.append(manifest | {"model": model.name, "manifest": name})
                bytes_left -= len(text)
        if len(checked) == count_before:
            raise ValueError(f"{model.name} has no part: no manifest-*.json is in it")
    return checked


def _read_limited(file: BinaryIO, largest: int) -> bytes:
    text = file.read(largest + 1)
    if len(text) > largest:
        raise ValueError(f"it has more than {largest} bytes")
    return text


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _check_manifest(manifest: Any) -> None:
    """Raise ValueError unless this is a valid manifest in the format of rows/parts.py."""
    if type(manifest) is not dict or _is_deeper(manifest, MAX_DEPTH):
        raise ValueError("it is not a JSON object, or too deep a one")
    for key, types in KEY_TYPES.items():
        if type(manifest.get(key)) not in types or key not in manifest:
            raise ValueError(f"{key} is missing, or of another kind than {types[0].__name__}")
    rows, total, hosts, arrays = (manifest[key] for key in ("rows", "total", "hosts", "arrays"))
    _check_sizes("rows", rows)
    _check_sizes("total", [total or 0])
    # Without a total, the host has files of its own, and numbers their rows from 0.
    sharded = total is None
    if (
        len(rows) != 2
        or not rows[0] <= rows[1] <= (rows[1] if sharded else total)
        or (sharded and rows[0])
    ):
        raise ValueError(f"rows are {rows}, of {total} in all")
    if (
        not all(type(host) is str for host in hosts)
        or len({*hosts}) < len(hosts)
        or manifest["host"] not in hosts
    ):
        raise ValueError("hosts are not names, each once, and host one of them")
    _check_sizes("files", list(manifest["files"].values()))
    if (total_in_files := sum(manifest["files"].values())) != (rows[1] if sharded else total):
        raise ValueError(f"its files have {total_in_files} rows, which contradicts rows or total")
    numbers = manifest["settings"].get("numbers", [])
    if type(numbers) is not list or not all(type(name) is str for name in numbers):
        raise ValueError("settings.numbers: expected a list of names")
    if len(arrays) > MAX_ARRAYS or (not arrays and rows[0] < rows[1]):
        raise ValueError(f"it has {len(arrays)} arrays; expected 1 to {MAX_ARRAYS}")
    for name, array in arrays.items():
        check_name(name)
        _check_array(name, array)
        if name in numbers and np.dtype(array["dtype"]).kind not in "iu":
            raise ValueError(f"{name}: expected integers, numbers of rows; found {array['dtype']}")
    _check_lengths(rows[1] - rows[0], {name: array["shape"][0] for name, array in arrays.items()})
    if len({array["file"] for array in arrays.values()}) < len(arrays):
        raise ValueError("two of its arrays are in one file")


def _check_lengths(rows: int, lengths: dict[str, int]) -> None:
    """Raise ValueError unless the arrays have an entry for each row.

    With an array `counts` the others may have any number of entries, as long as all have the same.
    """
    entries = {length for name, length in lengths.items() if name != "counts"}
    if (
        lengths.get("counts", rows) != rows
        or ("counts" not in lengths and entries - {rows})
        or len(entries) > 1
    ):
        raise ValueError(f"its arrays have {lengths} entries, of {rows} rows")


def _check_array(name: str, array: Any) -> None:
    if type(array) is not dict or not all(
        type(array.get(key)) is str for key in ("dtype", "file", "blake2b")
    ):
        raise ValueError(f"{name} has no dtype, file or blake2b")
    if type(array.get("shape")) is not list or not array["shape"]:
        raise ValueError(f"the shape of {name} is missing or has no rows")
    _check_sizes(f"the shape of {name}", array["shape"])
    try:
        dtype = np.dtype(array["dtype"] if DTYPE_TEXT.fullmatch(array["dtype"]) else object)
    except TypeError:
        dtype = np.dtype(object)
    if not plain(dtype) or dtype.str != array["dtype"]:
        raise ValueError(
            f"{name} is of dtype {array['dtype']!r}; expected numbers, and what else has a "
            "fixed size"
        )
    header(dtype, tuple(array["shape"]))
    size = dtype.itemsize
    for length in array["shape"]:
        size *= max(1, length)
    if size > LARGEST_NUMBER:
        raise ValueError(f"{name} is {array['dtype']} {array['shape']}, which is too large")


def _check_sizes(what: str, numbers: list[Any]) -> None:
    if not all(type(number) is int and 0 <= number <= LARGEST_NUMBER for number in numbers):
        raise ValueError(f"{what}: not whole numbers from 0 on")


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested on more than `levels` levels."""
    inner = value.values() if type(value) is dict else value if type(value) is list else ()
    return not levels or any(_is_deeper(each, levels - 1) for each in inner)


def ordered(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts in the order of their rows.

    Raises ValueError if they are of different jobs, or if rows are missing or in two parts.
    """
    first = parts[0]
    sharded = first["total"] is None
    for part in parts:
        for key in ("settings", "total", "hosts" if sharded else "source"):
            if part[key] != first[key]:
                raise ValueError(
                    f"{title(part)} is of another {key}: {part[key]!s:.200}, and {title(first)} "
                    f"has {first[key]!s:.200}; merge parts of one job"
                )
    return _order_by_host(parts) if sharded else _order_by_row(parts, first["total"])


def _order_by_row(parts: list[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    by_row = sorted(parts, key=lambda part: part["rows"])
    reached = 0
    previous: dict[str, Any] = {}
    # A part without rows, of a host that had none to compute, fits anywhere.
    for part in (part for part in by_row if part["rows"][0] < part["rows"][1]):
        start, stop = part["rows"]
        if start > reached:
            raise ValueError(
                f"rows {reached} to {start - 1} are in no part; give the part that has them"
            )
        if start < reached:
            raise ValueError(
                f"rows {start} to {min(stop, reached) - 1} are in both {title(previous)} and "
                f"{title(part)}"
            )
        reached = stop
        previous = part
    if reached != total:
        raise ValueError(
            f"rows {reached} to {total - 1} are in no part; give the part that has them"
        )
    return by_row


def _order_by_host(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_host: dict[str, dict[str, Any]] = {}
    for part in parts:
        if part["host"] in by_host:
            raise ValueError(
                f"{title(by_host[part['host']])} and {title(part)} are both of {part['host']}"
            )
        by_host[part["host"]] = part
    owner: dict[str, dict[str, Any]] = {}
    for part in parts:
        for file in part["files"]:
            if file in owner:
                raise ValueError(f"{file} is in both {title(owner[file])} and {title(part)}")
            owner[file] = part
    if missing := [host for host in parts[0]["hosts"] if host not in by_host]:
        raise ValueError(f"the part of {missing[0]} is missing; give the one that has its files")
    return [by_host[host] for host in parts[0]["hosts"]]


def title(part: dict[str, Any]) -> str:
    """Return how error messages name a part."""
    return f"{part['model']} (rows {part['rows'][0]} to {part['rows'][1] - 1})"
