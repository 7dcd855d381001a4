"""What shards are made of: what is taken, what is left out, and what is refused by its name."""

import datetime
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.shards.origins import ImageFolder, Table, image_kind, origin_at


@pytest.fixture
def folder(tmp_path):
    """A folder of two classes with an image in each."""
    for number, name in enumerate("ab"):
        path = tmp_path / "images" / name / f"{number}.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(path)
    return tmp_path / "images"


def taken(origin):
    return [
        (sample.pop("cls").decode(), *sample) for sample in ImageFolder(origin, seed=0).samples(0)
    ]


def test_images_in_folders_within_a_class_and_behind_links_are_taken(folder, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "elsewhere/x.JPEG")
    (folder / "a/more").symlink_to(tmp_path / "elsewhere")
    (folder / "c").symlink_to(tmp_path / "elsewhere")
    assert sorted(taken(folder)) == [("0", "jpg"), ("0", "png"), ("1", "png"), ("2", "jpg")]
    assert capsys.readouterr().out == ""


def test_what_is_left_out_is_counted(folder, capsys):
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "a/.cache").mkdir()
    for name in ("beside.png", "a/notes.txt", "a/x.heic", "a/.png", ".ipynb_checkpoints/1.png"):
        (folder / name).write_bytes(b"")
    assert sorted(taken(folder)) == [("0", "png"), ("1", "png")]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("4 files are left out (") and "beside.png: images are .jpg" in line


def link_upwards(folder):
    (folder / "a/up").symlink_to(folder)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "a/0.png").write_bytes(b""), "a/0.png: found an empty file"),
        (lambda folder: (folder / "a/1.jpg").write_bytes(b"<html>"), "a/1.jpg: found other bytes"),
        (lambda folder: os.mkfifo(folder / "a/pipe.png"), "a/pipe.png: found no file"),
        (lambda folder: (folder / "c").mkdir(), "c: found no image in it"),
        (link_upwards, "a/up: found a link to a folder that it is in"),
        (lambda folder: (folder / "a").rename(folder / "a\n"), "a class has the name 'a"),
    ],
)
def test_what_is_no_image_is_named(folder, damage, says):
    damage(folder)
    with pytest.raises(UserError) as raised:
        taken(folder)
    assert says in str(raised.value) and str(raised.value).isprintable()


def test_a_folder_that_cannot_be_read_ends_the_call(folder, monkeypatch):
    (folder / "a/more").mkdir()
    scan = os.scandir

    def refusing(path):
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match="a/more"):
        ImageFolder(folder, seed=0)


def test_an_image_that_was_replaced_is_another_folder(folder):
    before = ImageFolder(folder, seed=0).identity
    os.utime(folder / "a/0.png", ns=(0, 0))
    assert ImageFolder(folder, seed=0).identity != before


@pytest.mark.parametrize("content", [b"P6 1 1", b"BM", b"II*\0", b"MM\0*", b"\x89PNG", b"RIFF"])
def test_images_are_known_by_how_they_begin(content):
    assert image_kind(content) and not image_kind(b"x" + content)


def test_what_is_neither_a_folder_nor_a_table(tmp_path):
    with pytest.raises(UserError, match="found no folder and no .parquet file"):
        origin_at(tmp_path / "x.csv", 0)


# Tables -------------------------------------------------------------------------------------------

PNG = b"\x89PNG 1"


def table_of(tmp_path, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet", **options)
    return Table(tmp_path / "t.parquet")


def test_a_column_named_as_a_kind_of_image_stays_itself(tmp_path):
    columns = {"png": ["a text"], "image": [PNG], "mask": [b"\xff\xd8\xff"], "label": [3]}
    (sample,) = table_of(tmp_path, columns).samples(0)
    assert sample == {"png": b"a text", "image": PNG, "jpg": b"\xff\xd8\xff", "cls": b"3"}


def test_rows_from_a_number_on(tmp_path):
    origin = table_of(tmp_path, {"x": list(range(200))}, row_group_size=70)
    assert [int(sample["x"]) for sample in origin.samples(150)] == list(range(150, 200))


@pytest.mark.parametrize("labels", [[3, -1], ["3", "-1"], [b"3", b"-1"]])
def test_labels_that_are_whole_numbers(tmp_path, labels):
    origin = table_of(tmp_path, {"label": labels})
    assert [int(sample["cls"]) for sample in origin.samples(0)] == [3, -1]


def test_a_label_is_named_by_its_row_before_any_shard_is_written(tmp_path):
    labels = [*range(500), None]
    with pytest.raises(UserError, match="row 500 has no value in label"):
        table_of(tmp_path, {"label": labels}, row_group_size=70)


def test_values_that_json_does_not_have_are_texts(tmp_path):
    (sample,) = table_of(tmp_path, {"day": [datetime.date(2026, 11, 28)]}).samples(0)
    assert sample == {"day": b'"2026-11-28"'}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"x": pyarrow.array([], "int64")}, "found 0 rows of 1 columns"),
        ({}, "found 0 rows of 0 columns"),
        ({str(number): [1] for number in range(33)}, "found 33 columns, expected at most 32"),
        ({"": [1]}, "a column has the name ''"),
        ({"a/b": [1]}, "found / in the name of the column a/b"),
        ({"cls": [1], "label": [1]}, "found the columns cls and label, which become one field"),
        ({"label": [3, None]}, "row 1 has no value in label, expected a whole number"),
        ({"label": [1.0, 2.5]}, "row 0 has 1.0 in label"),
        ({"label": ["7", "cat"]}, "row 1 has 'cat' in label"),
        ({"label": [True]}, "row 0 has True in label"),
        ({"label": [[1, 2]]}, "row 0 has [1, 2] in label"),
        ({"cls": [b"7", b"x\n"]}, "row 1 has b'x\\n' in cls"),
        ({"x": [[PNG, PNG]]}, "row 0 has bytes within x; give each file a column"),
        ({"x": pyarrow.array([None], "int64")}, "row 0 has no value"),
        ({"x": pyarrow.array([1], "timestamp[ns]")}, "row group 0 cannot be read"),
        ({"x": pyarrow.array([2**60], "date64")}, "row group 0 cannot be read"),
    ],
)
def test_a_table_that_cannot_become_shards(tmp_path, columns, says):
    with pytest.raises(UserError) as raised:
        list(table_of(tmp_path, columns).samples(0))
    assert says in str(raised.value) and "t.parquet" in str(raised.value)


def test_a_table_with_two_columns_of_one_name(tmp_path):
    table = pyarrow.table([[1], [2]], names=["x", "x"])
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="found the columns x and x"):
        Table(tmp_path / "t.parquet")


def test_a_damaged_page_names_the_table(tmp_path):
    table_of(tmp_path, {"x": [f"{number}" * 50 for number in range(300)]}, compression="snappy")
    content = bytearray((tmp_path / "t.parquet").read_bytes())
    content[40:400] = bytes(360)
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"t\.parquet: row group 0 cannot be read"):
        list(Table(tmp_path / "t.parquet").samples(0))
