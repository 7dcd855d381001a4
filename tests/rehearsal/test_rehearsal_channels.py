"""What a job's channels hold: objects of S3 and folders of this machine, whole or in shards."""

import os
from pathlib import Path

import pytest
from rehearsed_inputs import (
    PAGE_SIZE,
    ROLE,
    channel,
    empty_bucket,  # noqa: F401  the fixture s3
    file_texts,
    group,
    job,
    make_layouts,
    put_objects,
    write_files,
)

from sagemaker_rehearsal.jobs import channels
from sagemaker_rehearsal.jobs.channels import JobFailed

RELATIVE_NAMES = {
    ("data/train/a", "data/train"): "a",
    ("data/train/a", "data/train/"): "a",
    ("data/train/b/c", "data/train"): "b/c",
    ("data/train", "data/train"): "train",
    ("data/train-2/a", "data/train"): "train-2/a",
    ("data/train-2", "data/tr"): "train-2",
    ("a/b", ""): "a/b",
    ("a", "a"): "a",
    ("a//b", "a"): "b",
    ("a//b", "a/"): "b",
}


@pytest.mark.parametrize(("key", "prefix"), RELATIVE_NAMES)
def test_the_name_of_an_object_in_a_channel(key, prefix):
    assert channels.relative(key, prefix) == RELATIVE_NAMES[key, prefix]


@pytest.mark.parametrize("name", ["..", "../a", "a/../../b", "a/..", "/etc/passwd"])
def test_a_name_that_leads_out_of_the_channel(tmp_path, name):
    with pytest.raises(JobFailed, match="is not a name of a file"):
        channels.inside(tmp_path, name)
    assert channels.inside(tmp_path, "a..b/...") == tmp_path / "a..b/..."


def fetch(s3, uri: str, folder: Path) -> dict[str, str]:
    """Fetch the files of an address, and return their texts."""
    names = channels.fetch(
        s3, {"S3Uri": uri}, folder, ROLE, [folder.parent, Path("/no")], lambda: None
    )
    fetched_files = file_texts(folder)
    assert sorted(names) == sorted(fetched_files)
    return fetched_files


def test_a_stop_ends_the_copying_of_a_folder(tmp_path):
    (tmp_path / "data").mkdir()
    for name in "abc":
        (tmp_path / "data" / name).touch()
    asked = []

    def check_not_ended() -> None:
        asked.append(None)
        if len(asked) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        channels.fetch_files(
            tmp_path / "data", "file://", tmp_path / "copy", [tmp_path], check_not_ended
        )
    assert len(list((tmp_path / "copy").iterdir())) == 1


@pytest.mark.slow
def test_what_an_address_stands_for(s3, tmp_path):
    put_objects(s3, "data/a", "data/b/c", "data/b/", "data-2/d", "data", "run#1/e?f", "other")
    below = {"a": "data/a", "b/c": "data/b/c"}
    assert fetch(s3, "s3://bucket/data/", tmp_path / "1") == below
    beside = {"data": "data", "data-2/d": "data-2/d"}
    assert fetch(s3, "s3://bucket/data", tmp_path / "3") == below | beside
    assert fetch(s3, "s3://bucket/data/a", tmp_path / "4") == {"a": "data/a"}
    assert fetch(s3, "s3://bucket/run#1/", tmp_path / "5") == {"e?f": "run#1/e?f"}
    assert fetch(s3, "s3://bucket/run#1/e?f", tmp_path / "6") == {"e?f": "run#1/e?f"}
    assert fetch(s3, "https://s3.us-east-1.amazonaws.com/bucket/other", tmp_path / "7") == {
        "other": "other"
    }
    with pytest.raises(JobFailed, match="Data download failed: s3://bucket: File exists"):
        fetch(s3, "s3://bucket", tmp_path / "8")  # `data` is a file, and a folder
    s3.delete_object(Bucket="bucket", Key="data")
    assert fetch(s3, "s3://bucket", tmp_path / "9")["data/b/c"] == "data/b/c"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        (
            "s3://bucket/none",
            rf'No S3 objects found under S3 URL "s3://bucket/none" .* the role "{ROLE}" has '
            r'"s3:List',
        ),
        (
            "s3://no-such-bucket/x",
            r' on bucket "no-such-bucket"\. Error message from S3: NoSuchBucket: ',
        ),
        (
            "s3://No Bucket!/x",
            r'on bucket "No Bucket!"\. Error message from S3: Parameter validation failed',
        ),
        ("s3://[x/y", r'on bucket "\[x"\. Error message from S3: Parameter validation failed'),
        (
            "file:///no/such/folder",
            "file:///no/such/folder is not a file, nor a folder with files in it",
        ),
    ],
)
def test_an_address_with_nothing_at_it(s3, tmp_path, uri, reason):
    with pytest.raises(JobFailed, match=f"^ClientError: Data download failed:.*{reason}"):
        fetch(s3, uri, tmp_path / "channel")


def test_a_key_that_leads_out_of_the_channel(s3, tmp_path):
    put_objects(s3, "data/../../out")
    with pytest.raises(JobFailed, match="is not a name of a file"):
        fetch(s3, "s3://bucket/data", tmp_path / "a/b/channel")
    assert file_texts(tmp_path) == {}


def test_a_folder_of_this_machine(s3, tmp_path):
    write_files(tmp_path / "from/my data", "a", "b/c", "empty/")
    (tmp_path / "from/my data/link").symlink_to("a")
    uri = f"file://{tmp_path}/from/my%20data"
    assert fetch(s3, uri, tmp_path / "1") == {"a": "a", "b/c": "b/c", "link": "a"}
    assert fetch(s3, f"{uri}/b/c", tmp_path / "2") == {"c": "b/c"}
    os.mkfifo(tmp_path / "from/my data/pipe")
    assert "pipe" not in fetch(s3, uri, tmp_path / "3")


def test_a_file_that_cannot_be_read_fails_the_job(s3, tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    write_files(tmp_path / "from", "a")
    monkeypatch.setattr(channels.shutil, "copyfile", refused)
    says = r"^ClientError: Data download failed: file:///\S+/from: Permission denied$"
    with pytest.raises(JobFailed, match=says):
        fetch(s3, f"file://{tmp_path}/from", tmp_path / "channel")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["File", "FastFile"])
@pytest.mark.parametrize("source", ["S3", "here"])
def test_shards_are_all_of_it_once(s3, tmp_path, mode, source):
    names = [f"data/{number:02}" for number in range(2 * PAGE_SIZE + 3)]  # three pages
    put_objects(s3, *names)
    write_files(tmp_path, *names)
    uri = "s3://bucket/data" if source == "S3" else f"file://{tmp_path}/data"
    for hosts in [3] if source == "S3" else [1, 2, 3, 4, 5, 6, 7, 20]:
        request = job(channel("a", uri, sharded=True, InputMode=mode), hosts=hosts)
        layouts = make_layouts(request, tmp_path / f"{hosts}")
        stops = []
        shared = tmp_path / f"{hosts}/shared"
        channels.deliver(
            s3, request, layouts, shared, [tmp_path], lambda stops=stops: stops.append(1)
        )
        shards = [
            sorted(file_texts(host_layout.channel("a")).values())
            for host_layout in layouts.values()
        ]
        assert sorted(sum(shards, [])) == names
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
        assert len(stops) >= len(names)  # it can be stopped at each of them
        assert not (tmp_path / f"{hosts}/shared/a").exists()


def test_channels_of_groups_and_copies_of_their_own(s3, tmp_path):
    write_files(tmp_path / "from", "x", "y/z")
    uri = f"file://{tmp_path}/from"
    groups = [group("g", 1), group("h", 2)]
    request = job(
        channel("all", uri, groups=["g", "h"]),
        channel("some", uri, groups=["h"], sharded=True),
        channel("fast", uri, groups=["h"], InputMode="FastFile"),
        groups=groups,
    )
    layouts = make_layouts(request, tmp_path / "hosts")
    channels.deliver(s3, request, layouts, tmp_path / "shared", [tmp_path], lambda: None)
    first_host, second_host, third_host = layouts.values()
    assert [path.name for path in (first_host.folder / "input/data").iterdir()] == ["all"]
    assert file_texts(second_host.channel("some")) == {"x": "x"}
    assert file_texts(third_host.channel("some")) == {"y/z": "y/z"}
    (first_host.channel("all") / "x").write_text("changed")
    assert (second_host.channel("all") / "x").read_text() == "x"
    # There is one copy for both.
    assert (second_host.channel("fast") / "x").samefile(third_host.channel("fast") / "x")
    assert (tmp_path / "from/x").read_text() == "x"
