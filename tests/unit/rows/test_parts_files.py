"""rows/parts.py: the files of a host's part, their names, headers and leftovers."""

import json

import numpy as np
import pytest
from row_parts import ABOUT

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.rows import parts


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("n" * 100, True),
        ("n" * 101, False),
        ("é" * 50, True),
        ("é" * 50 + "n", False),
        ("a b.c", True),
    ],
)
def test_the_name_of_an_array(name, allowed):
    if allowed:
        parts.check_name(name)
    else:
        with pytest.raises(UserError, match="names of up to 100 letters"):
            parts.check_name(name)


def test_a_name_that_is_much_too_long_is_cut_in_its_error():
    with pytest.raises(UserError, match=f"found an array '{'n' * 120}'; expected"):
        parts.check_name("n" * 300)


def test_the_rows_of_a_part_begin_at_byte_256(tmp_path):
    """Parts that an earlier version has written can be merged with this one."""
    parts.write(tmp_path, range(10), [(range(10), {"x": np.zeros(10)})], ABOUT)
    (array,) = tmp_path.glob("*.npy")
    assert np.load(array, mmap_mode="r").offset == 256


def test_what_a_killed_process_left_of_a_part_is_removed(tmp_path):
    left = tmp_path / "x-000000000000000-000000000000010.npy.abc.sagemaker-ignore"
    others = tmp_path / "x-000000000000010-000000000000020.npy.abc.sagemaker-ignore"
    for path in (left, others):
        path.touch()
    parts.write(tmp_path, range(10), [(range(10), {"x": np.zeros(10)})], ABOUT)
    assert not left.exists() and others.exists()


def test_what_a_host_has_from_an_earlier_job_is_removed(tmp_path):
    rows, array = range(10), np.zeros(10)
    keep = ["manifest-hostile.json", "manifest-list.json", "strange.npy", "x.npy"]
    for name in keep[2:]:
        (tmp_path / name).touch()
    outside = [str(tmp_path / "x.npy"), "../parts/strange.npy", 5, "absent.npy"]
    for file in outside:
        hostile = {"host": "a", "arrays": {"n": {"file": file}}}
        (tmp_path / "manifest-hostile.json").write_text(json.dumps(hostile))
        (tmp_path / "manifest-list.json").write_text('{"host": "a", "arrays": ["x.npy"]}')
        parts.write(tmp_path, range(4), [(range(4), {"x": array[:4]})], ABOUT | {"total": 4})
        parts.write(tmp_path, rows, [(rows, {"x": array, "y": array})], ABOUT)
        parts.write(tmp_path, rows, [(rows, {"x": array})], ABOUT)
        span = "000000000000000-000000000000010"
        left = {path.name for path in tmp_path.iterdir()} - {"manifest-hostile.json"}
        assert left == {f"manifest-{span}.json", f"x-{span}.npy", *keep[1:]}
