"""The index of shards, also one that somebody has forged."""

import json

import numpy as np
import pytest
import tar_shards

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards import index as indexes


@pytest.fixture
def path(tmp_path):
    return tar_shards.write(tmp_path, shards=2, each=3) / indexes.NAME


def test_each_sample_has_its_place_and_its_checksum(path):
    index = indexes.read(path)
    assert index.fields == ("txt", "x.bin") and len(index) == 6
    for sample in range(6):
        place = index.place(sample)
        assert place.shard == sample // 3
        shard = path.parent / index.shards[place.shard].name
        data = shard.read_bytes()[place.start : place.stop]
        expected = {"txt": str(sample).encode(), "x.bin": bytes([sample]) * (100 + sample)}
        assert place.contents(data) == expected
        assert place.contents(bytes([data[0] ^ 1]) + data[1:]) is None
        assert place.contents(data[:-1]) is None


def test_a_field_that_a_sample_does_not_have(tmp_path):
    rows = indexes.table([({"a": (0, 1)}, 7), ({"b": (5, 2)}, 8)], ["a", "b"])
    shards = [indexes.Shard("s.tar", 7, 2)]
    indexes.write(tmp_path / "i", shards, ["a", "b"], ["x"], iter([rows]))
    index = indexes.read(tmp_path / "i")
    assert index.classes == ("x",)
    assert index.place(0) == (0, 0, 1, [("a", 0, 1)], 7)
    assert index.place(1) == (0, 5, 7, [("b", 0, 2)], 8)


def test_another_content_is_another_identity(path, tmp_path):
    other = tar_shards.write(tmp_path / "other", shards=2, each=4) / indexes.NAME
    assert indexes.read(path).identity != indexes.read(other).identity
    assert 0 <= indexes.read(path).identity < 2**60


def forged(path, rows=None, **changes):
    """Write an index again, with other entries in its header and a right checksum."""
    line, _, content = path.read_bytes().partition(b"\n")
    header = json.loads(line) | changes
    content = content if rows is None else rows
    if "blake2b" not in changes:
        header["blake2b"] = indexes.hashlib.blake2b(content, digest_size=16).hexdigest()
    path.write_bytes(json.dumps(header).encode() + b"\n" + content)


def changed(path, name, value):
    """Return the rows with another value of the first sample's first field."""
    rows = np.array(indexes._read(path, path.open("rb")).rows)
    rows[name][0][0] = value
    return rows.tobytes()


SHARD = "shard-0.tar"


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": [["../etc", 10240, 3], ["b", 10240, 3]]},
        {"shards": [["/etc/passwd", 10240, 3], ["b", 10240, 3]]},
        {"shards": [["..", 10240, 3], ["b", 10240, 3]]},
        {"shards": [["a\x1b[2J", 10240, 3], ["b", 10240, 3]]},
        {"shards": [["a", 10240, 3], ["a", 10240, 3]]},
        {"shards": [["a", 10240, 2**60], ["b", 10240, 3]]},
        {"shards": [["a", 10240, -3], ["b", 10240, 9]]},
        {"shards": [["a", 10240.0, 3], ["b", 10240, 3]]},
        {"shards": [["a", 10240, True], ["b", 10240, 5]]},
        {"shards": [["a", 2**60, 3], ["b", 10240, 3]]},
        {"shards": [["a", 1024, 3], ["b", 10240, 3]]},  # samples beyond its end
        {"shards": []},
        {"shards": 7},
        {"shards": [[]]},
        {"fields": []},
        {"fields": ["a", "a"]},
        {"fields": [str(number) for number in range(33)]},
        {"fields": [7, 8]},
        {"classes": [None]},
        {"blake2b": "00" * 16},
        {"format": "another"},
    ],
    ids=str,
)
def test_a_forged_index_is_one_line(path, changes):
    forged(path, **changes)
    with pytest.raises(UserError, match=r"shards.index: found no index of .* \(.*make it again"):
        indexes.read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("offset", -1), ("offset", 2**62), ("offset", 10240), ("size", -2), ("size", 2**31 - 1)],
)
def test_a_place_outside_of_its_shard_is_one_line(path, name, value):
    forged(path, rows=changed(path, name, value))
    with pytest.raises(UserError, match="a sample is outside of shard-0.tar"):
        indexes.read(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"{", b"[" * 5000, b"\x00" * 100, b"{}\n"])
def test_what_is_not_an_index_is_one_line(tmp_path, content):
    (tmp_path / "shards.index").write_bytes(content)
    with pytest.raises(UserError, match="found no index of shards"):
        indexes.read(tmp_path / "shards.index")


def test_a_truncated_or_flipped_index_is_one_line(path):
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"\x00", whole[:-9] + b"\x01" + whole[-8:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match="bytes of rows|checksum does not match"):
            indexes.read(path)
