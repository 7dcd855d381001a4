"""rows/archives.py: parts in archives, in folders and on S3, hostile ones too."""

import gzip
import io
import os
import tarfile
from typing import NamedTuple

import numpy as np
import pytest
from row_parts import HOST_COUNT, archived, loaded, refused, same, write_parts

from sagemaker_lightning.rows import archives, merge, parts


def test_models_on_s3_are_downloaded_and_leave_nothing(tmp_path, monkeypatch, bucket):
    expected = write_parts(tmp_path / "parts")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, bucket.variables[name])
    for number in range(1, HOST_COUNT + 1):
        archive = archived(tmp_path / f"parts/algo-{number}", tmp_path / f"{number}.tar.gz")
        bucket.client.upload_file(str(archive), bucket.name, f"algo-{number}")
    addresses = [bucket.uri(f"algo-{number}") for number in (1, 2, 3)]
    merge.merge(addresses, tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), expected)
    assert len(list((tmp_path / "merged").iterdir())) == len(expected) + 1
    line = refused([addresses[0].replace("algo", "other")], tmp_path / "more")
    assert "other-1 could not be fetched: " in line and "404" in line


def test_a_part_may_be_larger_than_the_headers_of_an_archive(tmp_path):
    rows = range(2**18 + 1)
    about = {"source": "s", "settings": {}, "host": "a", "hosts": ["a"], "total": len(rows)}
    array = np.asfortranarray(np.arange(2 * len(rows)).reshape(-1, 2))
    about["files"] = {"x.npy": len(rows)}
    parts.write(tmp_path / "parts", rows, [(rows, {"n": array})], about)
    model = tmp_path / "model.tar"
    with tarfile.open(model, "w") as tar:
        for path in (tmp_path / "parts").iterdir():
            tar.add(path, path.name)
    merge.merge([str(model)], tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), {"n": array})


def hostile(text: bytes | None = None, **attributes) -> bytes:
    """Return a model.tar.gz with one member.

    The member is manifest-x.json unless its attributes say otherwise.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("manifest-x.json")
        member.size = len(text or b"")
        for name, value in attributes.items():
            setattr(member, name, value)
        tar.addfile(member, io.BytesIO(text or b""))
    return packed.getvalue()


class Bomb(NamedTuple):
    """A gzipped archive, made when it is written: a header, then 128 MiB of other bytes."""

    header: bytes

    def packed(self) -> bytes:
        return gzip.compress(self.header + b"0\n" * 2**26, compresslevel=1)


def header_of(member_type: bytes, size: int) -> bytes:
    member = tarfile.TarInfo("x")
    member.type = member_type
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


ARCHIVES = {
    "a link": (
        hostile(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "manifest-x.json is a link or no regular file",
    ),
    "a hard link": (
        hostile(type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        "is a link or no regular file",
    ),
    "a device": (hostile(type=tarfile.CHRTYPE), "is a link or no regular file"),
    "a pipe": (hostile(type=tarfile.FIFOTYPE), "is a link or no regular file"),
    "a file with holes": (hostile(type=tarfile.GNUTYPE_SPARSE), "is a link or no regular file"),
    "a name of a megabyte": (hostile(name="n" * 1_040_000), "has no part"),
    "a name of a mebibyte": (hostile(name="n" * 2**20), "its headers are too long"),
    "a link of another name": (hostile(type=tarfile.SYMTYPE, name="x"), "has no part"),
    "an absolute name": (hostile(b"{}", name="/etc/manifest-x.json"), "which is outside of it"),
    "a name above": (hostile(b"{}", name="../manifest-x.json"), "which is outside of it"),
    "depth": (hostile(b"[" * 10**6), "maximum recursion depth"),
    "some depth": (hostile(b'{"a":' * 50 + b"1" + b"}" * 50), "too deep a one"),
    "a manifest of zeros": (hostile(bytes(2**25)), "it has more than 16777216 bytes"),
    "not UTF-8": (hostile(b"\xff\xfe\xfa"), "is damaged ("),
    "a long number": (hostile(b'{"rows": [1' + b"0" * 5000 + b"]}"), "is damaged ("),
    "no number": (hostile(b'{"rows": NaN}'), "NaN is not JSON"),
    "a name of a gigabyte": (
        Bomb(header_of(tarfile.GNUTYPE_LONGNAME, 2**30)),
        "its headers are too long",
    ),
    "a pax header of a gigabyte": (
        Bomb(header_of(tarfile.XHDTYPE, 2**30)),
        "its headers are too long",
    ),
    "holes that are not numbers": (
        hostile(b"abc\n", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        "is damaged or no archive (invalid literal for int()",
    ),
    "a negative length": (Bomb(header_of(tarfile.REGTYPE, -(2**30))), "is damaged or no archive"),
    "half an archive": (hostile(b"{}" * 9999)[:60], "is damaged or no archive"),
    "half a header of gzip": (b"\x1f\x8b\x08", "is damaged or no archive"),
    "no archive": (b"PK\3\4", "is damaged or no archive"),
    "nothing": (b"", "is damaged or no archive"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_a_hostile_archive(tmp_path, case):
    content, says = ARCHIVES[case]
    packed = content.packed() if isinstance(content, Bomb) else content
    (tmp_path / "model.tar.gz").write_bytes(packed)
    assert says in refused([tmp_path / "model.tar.gz"], tmp_path / "merged")


def test_headers_may_have_a_mebibyte_between_two_files(tmp_path, monkeypatch):
    """Here 513 bytes: the last one of the file before, and the header of a short name."""
    expected = write_parts(tmp_path / "parts")
    model = tmp_path / "model.tar"
    with tarfile.open(model, "w", format=tarfile.GNU_FORMAT) as tar:
        for path in (tmp_path / "parts").rglob("*.*"):
            tar.add(path, path.name)
    monkeypatch.setattr(archives, "MAX_HEADER_BYTES", 513)
    merge.merge([str(model)], tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), expected)
    monkeypatch.setattr(archives, "MAX_HEADER_BYTES", 512)
    assert "its headers are too long" in refused([model], tmp_path / "more")


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo], ids=["a link", "a pipe"]
)
@pytest.mark.parametrize("pattern", ["scores-*.npy", "manifest-*.json"])
def test_a_folder_with_a_link_or_a_pipe_in_a_files_place(tmp_path, make, pattern):
    write_parts(tmp_path / "parts")
    path = next((tmp_path / "parts/algo-2").glob(pattern))
    path.unlink()
    make(path)
    assert refused([tmp_path / "parts"], tmp_path / "merged") == (
        f"{tmp_path}/parts: {path.name} is a link or no regular file; give the file itself"
    )


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("scores-*.npy", "is missing, which its manifest names"),
        ("manifest-*.json", "rows 10 to 19 are in no part"),
    ],
)
def test_a_folder_in_a_files_place_is_not_a_file(tmp_path, pattern, says):
    write_parts(tmp_path / "parts")
    path = next((tmp_path / "parts/algo-2").glob(pattern))
    path.unlink()
    path.mkdir()
    assert says in refused([tmp_path / "parts"], tmp_path / "merged")


def test_a_folder_with_a_link_or_a_pipe_of_another_name(tmp_path):
    expected = write_parts(tmp_path / "parts")
    (tmp_path / "parts/README").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "parts/pipe")
    merge.merge([str(tmp_path / "parts")], tmp_path / "merged")
    assert same(loaded(tmp_path / "merged"), expected)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "Too many levels of symbolic links"),
        (os.mkfifo, "manifest-x.json is damaged"),
    ],
    ids=["a link", "a pipe"],
)
def test_a_file_that_becomes_something_else_after_a_look_at_it(tmp_path, monkeypatch, make, says):
    (tmp_path / "parts").mkdir()
    make(tmp_path / "parts/manifest-x.json")
    monkeypatch.setattr(archives.stat, "S_ISREG", lambda mode: True)
    assert says in refused([tmp_path / "parts"], tmp_path / "merged")


def test_too_many_files(tmp_path, monkeypatch):
    write_parts(tmp_path / "parts")
    files = sum(path.is_file() for path in (tmp_path / "parts").rglob("*"))
    monkeypatch.setattr(archives, "MAX_FILES", files - 1)
    assert f"more than {files - 1} files" in refused([tmp_path / "parts"], tmp_path / "merged")
    monkeypatch.setattr(archives, "MAX_FILES", files)
    merge.merge([str(tmp_path / "parts")], tmp_path / "merged")
