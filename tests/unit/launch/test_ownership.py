"""What root has written into a person's folders belongs to that person."""

import os
from pathlib import Path

import pytest

from sagemaker_lightning.launch import ownership

pytestmark = pytest.mark.root

PERSON = 54321


@pytest.fixture
def mounted(tmp_path) -> Path:
    """A person's folder, with a folder of root's that has a file."""
    (tmp_path / "output/data").mkdir(parents=True)
    (tmp_path / "output/data/file").touch()
    os.chown(tmp_path / "output", PERSON, PERSON)
    return tmp_path / "output"


def owners(base: Path) -> dict[str, int]:
    return {str(path.relative_to(base)): path.lstat().st_uid for path in base.rglob("*")}


def test_all_below_a_persons_folder_is_that_persons(tmp_path, mounted):
    ownership.give_to_owners(tmp_path)
    assert owners(tmp_path) == {"output": PERSON, "output/data": PERSON, "output/data/file": PERSON}
    assert (mounted / "data/file").stat().st_gid == PERSON


def test_a_link_is_not_followed(tmp_path, mounted):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (mounted / "data/link").symlink_to(outside)
    (mounted / "data/other").hardlink_to(outside / "file")
    ownership.give_to_owners(tmp_path)
    assert owners(tmp_path)["output/data/link"] == PERSON
    assert outside.stat().st_uid == 0 and (outside / "file").stat().st_uid == 0


def test_what_was_there_before_and_the_input_stay(tmp_path, mounted, monkeypatch):
    (tmp_path / "input").mkdir()
    (tmp_path / "input/file").touch()
    os.chown(tmp_path / "input", PERSON, PERSON)
    started = (mounted / "data/file").stat().st_ctime + 2
    monkeypatch.setattr(ownership.psutil.Process, "create_time", lambda process: started)
    ownership.give_to_owners(tmp_path)
    assert owners(tmp_path) == {
        "input": PERSON,
        "input/file": 0,
        "output": PERSON,
        "output/data": 0,
        "output/data/file": 0,
    }
    monkeypatch.setattr(ownership.psutil.Process, "create_time", lambda process: 0)
    ownership.give_to_owners(tmp_path)
    assert owners(tmp_path)["output/data/file"] == PERSON and owners(tmp_path)["input/file"] == 0


def test_another_user_than_root_gives_nothing_away(tmp_path, mounted, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: PERSON)
    ownership.give_to_owners(tmp_path)
    assert owners(tmp_path)["output/data"] == 0
