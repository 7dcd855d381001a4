"""The index of a folder of reports."""

import json

from records import interrupted, job
from test_rehearsal_report import Page

from sagemaker_lightning.contract.atomic_files import json_text
from sagemaker_rehearsal.jobs.record import Comparison, Fault, Verdict
from sagemaker_rehearsal.report import goodput_data, index


def write(folder, name: str, record) -> None:
    (folder / name).mkdir()
    data = goodput_data.describe(record)
    (folder / name / goodput_data.FILE_NAME).write_text(json_text(data))


def cells(folder) -> list[list[str]]:
    """Return the texts of the index's rows."""
    index.write(folder)
    text = (folder / index.FILE_NAME).read_text()
    Page(text)  # well-formed
    rows = text.split("<tr>")[2:]
    return [
        [part.split("</")[0].rpartition(">")[2] for part in row.split("<td")[1:]] for row in rows
    ]


def test_the_reports_are_listed_the_newest_first(tmp_path):
    write(tmp_path, "old", interrupted(2))
    newer = job(status="Failed", failure="why")
    newer.created = 60.0
    newer.faults = [Fault(70.0, "algo-1", "kill rank", "rank 0", None, "by hand")]
    write(tmp_path, "new", newer)
    same = interrupted()
    same.created = 30.0
    same.comparison = Comparison("x", Verdict.SAME_BITS, "", 1.0, 1.0, {})
    write(tmp_path, "old.1", same)
    assert [row[:1] + row[2:3] + row[4:] for row in cells(tmp_path)] == [
        ["new", "Failed", "–", "–", "0", "failed with a reason"],
        ["old.1", "Completed", "58.3%", "70", "1", "same bits"],
        ["old", "Completed", "58.3%", "70", "1", "–"],
    ]
    page = Page((tmp_path / index.FILE_NAME).read_text())
    links = [attributes["href"] for name, attributes in page.elements if name == "a"]
    assert links == ["new/report.html", "old.1/report.html", "old/report.html"]


def test_what_is_not_a_report_of_ours_is_left_out(tmp_path):
    write(tmp_path, "good", interrupted())
    for number, text in enumerate(("[", "[]", "{}", json.dumps({"version": 1}))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / goodput_data.FILE_NAME).write_text(text)
    assert [row[0] for row in cells(tmp_path)] == ["good"]


def test_the_name_of_a_folder_is_no_markup_and_no_address(tmp_path):
    write(tmp_path, "javascript:x<b>&?#", interrupted())
    assert len(cells(tmp_path)) == 1
    page = Page((tmp_path / index.FILE_NAME).read_text())
    assert "javascript:x<b>&?#" in page.text
    (link,) = [attributes["href"] for name, attributes in page.elements if name == "a"]
    assert link == "javascript%3Ax%3Cb%3E%26%3F%23/report.html"


def test_the_oldest_of_many_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "MAX_JOBS", 2)
    for number in range(3):
        record = interrupted()
        record.created = float(number)
        write(tmp_path, str(number), record)
    assert [row[0] for row in cells(tmp_path)] == ["2", "1"]
    assert "1 older jobs are left out." in (tmp_path / index.FILE_NAME).read_text()


def test_a_folder_without_reports(tmp_path):
    assert cells(tmp_path) == []
