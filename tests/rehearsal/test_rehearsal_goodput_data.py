"""The goodput of a job as data: JSON by its schema, CSV, and a limit for a CI."""

import csv
import io
import json
import subprocess

import pytest
from environments import python_of
from records import attempt, interrupted, job, many, points

from sagemaker_lightning.contract.atomic_files import json_text
from sagemaker_rehearsal.report import goodput, goodput_data

VALIDATE = """
import json, sys
from jsonschema import Draft202012Validator
schema, *documents = json.load(sys.stdin)
Draft202012Validator.check_schema(schema)
for document in documents:
    problems = [error.message for error in Draft202012Validator(schema).iter_errors(document)]
    print(json.dumps(problems))
"""


def validated(*documents: dict) -> list[list[str]]:
    """Return what the schema says against each document."""
    schema = json.loads(goodput_data.SCHEMA.read_text())
    completed = subprocess.run(
        [python_of("rehearsal"), "-c", VALIDATE],
        input=json_text([schema, *documents]),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in completed.stdout.splitlines()]


@pytest.mark.slow
def test_goodput_is_as_its_schema_says():
    documents = [
        goodput_data.describe(interrupted(2), price=72.0, spot_price=36.0),
        goodput_data.describe(interrupted(), price={"ml.m5.large": 72.0}),
        goodput_data.describe(interrupted(), price=72.0),
        goodput_data.describe(many()),
        goodput_data.describe(job(status="Failed", failure="why")),
        goodput_data.describe(job(attempt(1, 0, None, points((20, 10))), status="InProgress")),
    ]
    assert validated(*documents) == [[]] * len(documents)
    # The schema forbids what it does not describe, and knows what must be there.
    missing = {name: value for name, value in documents[0].items() if name != "goodput"}
    wrong = [missing, documents[0] | {"more": 1}, documents[0] | {"goodput": "58 %"}]
    assert all(validated(*wrong))


def test_goodput_as_data_is_that_of_the_report():
    data = goodput_data.describe(interrupted(2), price=72.0, spot_price=36.0)
    measured = goodput.measure(interrupted(2), price=72.0, spot_price=36.0)
    assert data["goodput"] == measured.share == pytest.approx(70 / 120)
    assert (data["job"], data["status"], data["seconds"]) == ("job", "Completed", 160)
    assert (data["steps"], data["steps_lost"], data["steps_redone"]) == (70, 10, 10)
    assert (data["hosts"], data["interruptions"]) == (2, 1)
    assert data["cost"]["on_demand"] == measured.cost.on_demand
    assert data["cost"]["saving_percent"] == measured.cost.saving
    assert data["attempts"][0] == {
        "attempt": 1,
        "hosts": 2,
        "first_step": 0,
        "last_step": 40,
        "kept_step": 30,
        "start_up_seconds": 20,
        "kept_seconds": 60,
        "lost_seconds": 20,
        "ending_seconds": 20,
    }
    assert goodput_data.describe(interrupted())["cost"] is None


def test_goodput_as_csv_has_a_row_for_each_attempt_and_one_for_the_job():
    text = goodput_data.as_csv(goodput_data.describe(interrupted(2)))
    first, second, whole = csv.DictReader(io.StringIO(text))
    assert (first["attempt"], second["attempt"], whole["attempt"]) == ("1", "2", "all")
    assert first["first_step"] == "0" and second["first_step"] == "30"
    assert float(first["goodput"]) == 0.5 and float(whole["goodput"]) == pytest.approx(70 / 120)
    for name in ("kept_seconds", "lost_seconds", "instance_seconds"):
        assert float(first[name]) + float(second[name]) == float(whole[name])
    assert (whole["first_step"], whole["last_step"], whole["kept_step"]) == ("0", "70", "70")


def test_the_csv_of_a_job_without_an_attempt():
    header, row = goodput_data.as_csv(goodput_data.describe(job(status="Failed"))).splitlines()
    assert header.startswith("attempt,hosts,") and row.startswith("all,0,,,,0,0,0,0,0")


def test_a_goodput_below_the_limit_is_refused_in_one_line():
    data = goodput_data.describe(interrupted())
    goodput_data.check(data, 0.583)
    with pytest.raises(ValueError, match=r"^goodput: found 58\.33%, expected 90% or more"):
        goodput_data.check(data, 0.9)


def test_a_failed_job_has_no_goodput_and_nothing_has_none():
    failed = goodput_data.describe(interrupted()) | {"status": "Failed"}
    with pytest.raises(ValueError, match=r"found 0\.00% \(the job failed\), expected 1% or more"):
        goodput_data.check(failed, 0.01)
    with pytest.raises(ValueError, match="found none, as no instance was started"):
        goodput_data.check(goodput_data.describe(job(status="Stopped")), 0.0)
    with pytest.raises(ValueError, match="found none, as its log has no line of progress"):
        goodput_data.check(goodput_data.describe(job(status="Completed")), 0.0)


def test_what_has_no_goodput_is_named(tmp_path):
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/goodput.json").write_text("{")
    for name in ("none", "cut"):
        with pytest.raises(ValueError, match=f"^JOB: found no goodput of {name} in "):
            goodput_data.read(tmp_path, name)
