"""What the hosts of a job leave: one archive in S3, or files."""

import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from rehearsed_inputs import (
    content,
    empty_bucket,  # noqa: F401  the fixture s3
    file_texts,
    job,
    keys,
    write_files,
)

from sagemaker_rehearsal.jobs import artifacts


def make_outputs(tmp_path: Path, hosts: dict[str, list[str]]) -> dict[str, Path]:
    """Return the folders of hosts, each with files in its model."""
    for host, names in hosts.items():
        write_files(tmp_path / host / "model", *names)
        write_files(tmp_path / host / "output/data", "./")
    return {host: tmp_path / host for host in hosts}


def extract_archive(s3, key: str, folder: Path) -> dict[str, tarfile.TarInfo]:
    """Extract an archive, and return its members by name."""
    folder.mkdir(exist_ok=True)
    # With tar, which is safe; Python's tarfile is since 3.11.4, and Debian 12 has 3.11.2.
    subprocess.run(
        ["tar", "--extract", "--gzip", "--directory", folder], input=content(s3, key), check=True
    )
    with tarfile.open(fileobj=io.BytesIO(content(s3, key))) as tar:
        return {member.name: member for member in tar}


def test_what_all_hosts_leave_is_one_archive(s3, tmp_path):
    first_names = ["a b", "deep/c", "empty/", "same", "empty-2/"]
    second_names = ["same", "ü", "empty-2/x"]
    hosts = make_outputs(tmp_path, {"algo-1": first_names, "algo-2": second_names})
    (tmp_path / "algo-1/model/link").symlink_to("a b")
    (tmp_path / "algo-1/model/nowhere").symlink_to("not/there")
    (tmp_path / "algo-1/model/to-folder").symlink_to("deep")
    os.link(tmp_path / "algo-1/model/a b", tmp_path / "algo-1/model/twice")
    (tmp_path / "algo-2/model/same").write_text("of algo-2")
    write_files(tmp_path / "algo-2/output/data", "log")
    notes = []
    address, digests = artifacts.upload(s3, job(), hosts, tmp_path, notes.append)
    assert address == "s3://bucket/output/job/output/model.tar.gz"
    assert keys(s3) == ["output/job/output/model.tar.gz", "output/job/output/output.tar.gz"]
    members = extract_archive(s3, keys(s3)[0], tmp_path / "model")
    assert set(members) >= {
        "a b",
        "deep/c",
        "empty",
        "same",
        "ü",
        "link",
        "nowhere",
        "to-folder",
        "twice",
        "empty-2/x",
    }
    assert members["empty"].isdir() and members["nowhere"].issym() and members["to-folder"].issym()
    texts = file_texts(tmp_path / "model")
    assert texts["same"] == "of algo-2"
    assert texts["link"] == "a b"
    assert texts["twice"] == "a b"
    assert texts["a b"] == "a b"
    assert digests["same"] == hashlib.sha256(b"of algo-2").hexdigest()
    assert digests["link"] == digests["a b"] == hashlib.sha256(b"a b").hexdigest()
    assert set(digests) == {"a b", "deep/c", "empty-2/x", "link", "same", "twice", "ü"}
    assert notes == [
        "model: same of algo-2 replaces that of algo-1; give each host names of its own"
    ]
    assert list(extract_archive(s3, keys(s3)[1], tmp_path / "output")) == ["log"]


def test_uncompressed_artefacts(s3, tmp_path):
    hosts = make_outputs(tmp_path, {"algo-1": ["a b", "deep/c", "empty/"], "algo-2": ["d"]})
    (tmp_path / "algo-1/model/link").symlink_to("a b")
    (tmp_path / "algo-1/model/nowhere").symlink_to("not/there")
    request = job(OutputDataConfig={"S3OutputPath": "s3://bucket", "CompressionType": "NONE"})
    assert (
        artifacts.upload(s3, request, hosts, tmp_path, lambda _: None)[0]
        == "s3://bucket/job/output/model/"
    )
    assert keys(s3) == [f"job/output/model/{name}" for name in ("a b", "d", "deep/c", "link")]
    assert content(s3, "job/output/model/link") == b"a b"


@pytest.mark.parametrize(
    "hosts", [{"algo-1": ["x"], "algo-2": ["x/y"]}, {"algo-1": ["x/y"], "algo-2": ["x"]}]
)
def test_a_file_where_another_host_has_a_folder(s3, tmp_path, hosts):
    """The archive can be extracted; the file in the folder is left out."""
    notes = []
    artifacts.upload(s3, job(), make_outputs(tmp_path, hosts), tmp_path, notes.append)
    extract_archive(s3, keys(s3)[0], tmp_path / "model")
    assert file_texts(tmp_path / "model") == {"x": "x"}
    assert (
        len(notes) == 1 and notes[0].startswith("model: x/y of algo-") and "is left out" in notes[0]
    )


def test_nothing_is_an_empty_archive(s3, tmp_path):
    artifacts.upload(s3, job(), make_outputs(tmp_path, {"algo-1": []}), tmp_path, lambda _: None)
    assert [extract_archive(s3, key, tmp_path / "x") for key in keys(s3)] == [{}, {}]
