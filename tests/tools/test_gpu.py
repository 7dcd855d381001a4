"""benchmarks/gpu: a rehearsal of all parts, parts that fail, and the report's figures.

The figures are those of the file.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT

from benchmarks import carry
from benchmarks.gpu import report, runner
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import PARTS, ratio
from benchmarks.gpu.results import Results
from benchmarks.gpu.runner import Task

MACHINE_AND_COMMIT = {
    "gpu": "H",
    "gpu_memory": 140,
    "driver": "580",
    "hosts": [{"cpu": "C", "cores": 2, "memory": 8}],
}
MACHINE_AND_COMMIT |= {
    "versions": {"torch": "2"},
    "commit": "abc",
    "miniature": False,
    "date": "2026-01-01",
}
FIELDS = {
    "resume": {"weights", "seconds", "jobs"},
    "step": {"ours", "other"},
    "fast": {"accuracy", "seconds", "steady", "process"},
    "accurate": {"accuracy", "seconds", "steady", "process"},
    "original": {"ours", "other"},
    "costs": {"steps", "saves", "work", "bytes", "imports", "first_step"},
    "similarity": {"rows", "seconds"},
    "profile": {"milliseconds", "idle", "kernels", "gaps", "longest_gap", "top", "batches"},
    "sweep": {"accuracy", "seconds", "steady"},
}


@pytest.fixture
def results(tmp_path) -> Results:
    """Results without any measurement."""
    return Results(tmp_path / "gpu-2026-01-01.json", dict(MACHINE_AND_COMMIT), {})


def rehearse(*flags: str) -> subprocess.CompletedProcess:
    """Run the benchmark in miniature; 48 s of a core for all parts."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--miniature", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.soak
def test_a_rehearsal_has_every_part_and_the_next_call_does_what_is_missing(cifar, tmp_path):
    flags = [f"--out={tmp_path}", f"--data_dir={cifar}", "--commit=abc"]
    completed = rehearse(*flags)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (file,) = tmp_path.glob("gpu-*.json")
    content = json.loads(file.read_text())
    assert {"gpu", "driver", "hosts", "versions", "commit", "date", "miniature"} <= content[
        "about"
    ].keys()
    assert list(content["parts"]) == list(FIELDS) == list(PARTS)
    for name, part in content["parts"].items():
        assert (part["status"], part["line"]) == ("complete", ""), name
        fields = set().union(*(record.keys() for record in part["records"]))
        assert fields == FIELDS[name] | {"setting", "round"}, name
    (job,) = content["parts"]["resume"]["records"][1]["jobs"]
    assert job["right"] and job["wrong"] == job["hung"] == 0
    step_records = content["parts"]["step"]["records"]
    del content["parts"]["similarity"]["records"][:]
    content["parts"]["similarity"]["status"] = "unfinished"
    file.write_text(json.dumps(content))
    again = rehearse(*flags, "--parts=step,similarity")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "step: complete already" in again.stdout and "similarity: complete\n" in again.stdout
    content = json.loads(file.read_text())
    assert content["parts"]["step"]["records"] == step_records
    assert content["parts"]["similarity"]["records"]
    assert report.text(Results.read(file)) in again.stdout  # the table comes from the file alone


# What a part may do -------------------------------------------------------------------------------


def value() -> dict:
    return {"value": 1}


def failing() -> dict:
    raise ValueError("no such thing\nand more")


def leaving() -> dict:
    """Leave as a failed training does."""
    raise SystemExit(
        "much\nModuleNotFoundError: No module named 'x'\nerror: the training failed, see above"
    )


def crashing() -> dict:
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(folder: Path) -> dict:
    """Hang, and let a child hang, too."""
    child = subprocess.Popen(["sleep", "600"])
    Path(folder, "child").write_text(str(child.pid))
    time.sleep(600)


@pytest.mark.slow
def test_a_measurement_that_fails_costs_a_line_and_the_others_continue(results, tmp_path):
    works = {"a": value, "b": failing, "c": leaving, "d": crashing, "e": value}
    tasks = [Task(setting, number, work) for number in (1, 2) for setting, work in works.items()]
    lines = list(runner.run("part", tasks, results, 60, tmp_path / "log"))
    assert "part, b: failed: ValueError: no such thing" in lines
    assert "part, c: failed: ModuleNotFoundError: No module named 'x'" in lines
    assert "part, d: failed: it was killed, or it crashed" in lines
    part = Results.read(results.path).parts["part"]
    assert [(record["setting"], record["round"]) for record in part["records"]] == [
        (setting, number) for number in (1, 2) for setting in "ae"
    ]
    assert part["status"] == "failed" and len(lines) == 4 + 3 + 1
    # The tasks are repaired: only these are done now.
    tasks = [Task(task.setting, task.round, value) for task in tasks]
    assert len(list(runner.run("part", tasks, results, 60, tmp_path / "log"))) == 6 + 1
    assert Results.read(results.path).parts["part"]["status"] == "complete"


@pytest.mark.slow
def test_a_part_that_overruns_keeps_what_it_measured_and_leaves_nothing_behind(results, tmp_path):
    tasks = [Task("a", 1, value), Task("b", 1, partial(hanging, tmp_path)), Task("c", 1, value)]
    list(runner.run("part", tasks[:1], results, 60, tmp_path / "log"))
    *_, last_line = runner.run("part", tasks, results, 5, tmp_path / "log")
    assert last_line == "part: unfinished: 2 of 3 measurements are missing: its 5 s were over"
    part = Results.read(results.path).parts["part"]
    assert [record["setting"] for record in part["records"]] == ["a"]
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or " Z " in child.read_text()


def test_results_continue_only_where_they_are_of_the_same(tmp_path):
    first_results = Results.opened(tmp_path, MACHINE_AND_COMMIT, "2026-01-01")
    first_results.write()
    assert (
        Results.opened(tmp_path, MACHINE_AND_COMMIT | {"date": "2026-01-02"}, "2026-01-02").path
        == first_results.path
    )
    elsewhere = MACHINE_AND_COMMIT | {"hosts": [{"cpu": "D", "cores": 4, "memory": 9}]}
    assert len(Results.opened(tmp_path, elsewhere, "2026-01-01").about["hosts"]) == 2
    other_results = Results.opened(tmp_path, MACHINE_AND_COMMIT | {"commit": "def"}, "2026-01-01")
    assert other_results.path.name == "gpu-2026-01-01-2.json"
    (tmp_path / "gpu-2026-01-03.json").write_text("{")
    with pytest.raises(ValueError, match=r"gpu-2026-01-03.json: cannot be read as results"):
        Results.opened(tmp_path, MACHINE_AND_COMMIT, "2026-01-01")


# The machine --------------------------------------------------------------------------------------

GOOD_MACHINE = {
    "gpu": "H",
    "gpu_memory": 140,
    "gpu_free": 139,
    "driver": "580",
    "trouble": "",
    "cpu": "C",
    "cores": 2,
    "memory": 64,
    "free": 60,
    "disk": 50,
}


@pytest.mark.parametrize(
    ("machine_state", "message"),
    [
        ({}, ""),
        (
            {"gpu": "", "driver": ""},
            "GPU: none is found here; run it where there is one, or rehearse it",
        ),
        (
            {"gpu": "", "driver": "470", "trouble": "too old"},
            r"GPU: torch .* \(too old\); found is driver 470, needed",
        ),
        ({"gpu_free": 3}, "GPU memory: found 3.0 GiB free, expected 8; end"),
        ({"free": 2}, "memory: found 2.0 GiB free, expected 8"),
        ({"disk": 1.5}, "disk for temporary files: found 1.5 GiB free, expected 8"),
    ],
)
def test_a_machine_that_will_not_do_is_reported_in_a_line(machine_state, message):
    obstacle = Machine(**GOOD_MACHINE | machine_state).obstacle()
    assert re.match(message, obstacle) and "\n" not in obstacle and bool(obstacle) == bool(message)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--parts=step,stop"], "--parts: found stop, expected resume, step, fast"),
        (["--data_dir=nowhere"], "--data_dir: found nowhere, expected a folder"),
        ([], "GPU: none is found here"),
        (["report", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_a_call_that_measures_nothing_says_why(flags, line, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert main(flags if "report" in flags else [*flags, f"--out={tmp_path}"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ") and line in output and output.count("\n") == 1
    assert not list(tmp_path.iterdir())


# Figures ------------------------------------------------------------------------------------------


def test_the_table_is_computed_from_the_values(results):
    records = [
        {"setting": "s", "round": 1, "ours": [9, 12, 10], "other": [10, 10, 10]},
        {"setting": "s", "round": 2, "ours": [20], "other": [10]},
    ]
    assert [ratio(record) for record in records] == [1, 2]
    results.parts["step"] = {"status": "complete", "line": "", "seconds": 1, "records": records}
    jobs = [{"right": right, "kills": 1, "stops": 2, "hung": 0} for right in (True, True, False)]
    resume = [
        {"setting": "r", "round": 0, "weights": ["a", "b"]},
        {"setting": "r", "round": 1, "jobs": jobs},
    ]
    results.parts["resume"] = {
        "status": "unfinished",
        "line": "1 of 2",
        "seconds": 1,
        "records": resume,
    }
    text = report.text(results)
    assert "| s | 1.5 [1..2] | 15 [10..20] | 10 [10..10] | 2 |" in text
    assert (
        "- r: 2 of 3 interrupted jobs ended with the bits of one left alone; "
        "3 kills, 6 stops, 0 hung"
    ) in text
    assert "DIFFERENT bits" in text and "Unfinished: 1 of 2." in text and "**fast**" in text


def test_the_docs_have_the_newest_figures_and_names_claim_nothing_before():
    newest = report.newest()
    assert report.PAGE.read_text() == report.written(report.PAGE.read_text(), newest)
    recipes, results_page = (
        (ROOT / page).read_text() for page in ("docs/flags-and-recipes.md", "results/figures.md")
    )
    if not newest:
        for name in ("fast", "accurate"):
            assert (
                "Not measured on a GPU yet"
                in (ROOT / f"app/recipes/{name}.yaml").read_text().partition("\n")[0]
            )
            assert re.search(
                rf"^\| `{name}` \|.*\| not measured on a GPU yet \|$", recipes, re.MULTILINE
            )
        assert "**Not measured on a GPU yet**" in results_page


@pytest.mark.parametrize("flags", [[], ["--write"]])
def test_a_report_is_printed_or_put_into_the_docs(results, flags, capsys, monkeypatch, tmp_path):
    record = {"setting": "s", "round": 1, "ours": [9, 12, 10], "other": [10, 10, 10]}
    results.parts["step"] = {"status": "complete", "line": "", "seconds": 1, "records": [record]}
    results.write()
    monkeypatch.setattr(report, "PAGE", tmp_path / "gpu.md")
    page = (ROOT / "results/gpu.md").read_text()
    report.PAGE.write_text(page)
    assert main(["report", str(results.path), *flags]) == 0
    assert report.text(results) in capsys.readouterr().out
    assert report.PAGE.read_text() == (report.written(page, results) if flags else page)
    assert (report.text(results) in report.PAGE.read_text()) == bool(flags)


# What travels -------------------------------------------------------------------------------------


def test_what_a_machine_lacks_is_carried_up_to_a_size(monkeypatch, tmp_path):
    lines = []

    def pip(line, **_):
        lines.append(line)
        if line[-1] == "absent":
            return subprocess.CompletedProcess(
                line, 1, "", "WARNING: x\nERROR: No matching distribution\n"
            )
        folder = next(word.partition("=")[2] for word in line if word.startswith("--dest="))
        Path(folder, "one.whl").write_bytes(b"0" * 1000)
        return subprocess.CompletedProcess(line, 0, "", "")

    monkeypatch.setattr(carry.subprocess, "run", pip)
    monkeypatch.setattr(carry, "_checkout", list)
    data = tmp_path / "data"
    data.mkdir()
    (data / "images").write_bytes(b"0" * 2**20)
    folder = tmp_path / "carried"
    assert carry.carry(folder, "3.12", ["one==1"], data, 64) == pytest.approx(1 + 1000 / 2**20)
    assert "--python-version=3.12" in lines[0] and (folder / "data/images").is_file()
    says = r"carried: 1.0 MiB travel with the checkout, expected 0.5"
    with pytest.raises(SystemExit, match=says):
        carry.carry(folder, "3.12", ["one==1"], data, 0.5)
    with pytest.raises(SystemExit, match=r"no wheel for Python 3.12: ERROR: No matching"):
        carry.carry(folder, "3.12", ["absent"], None, 64)
    with pytest.raises(SystemExit, match=r"--data: found .*nowhere, expected a folder"):
        carry.carry(folder, "3.12", ["one==1"], tmp_path / "nowhere", 64)


@pytest.mark.soak  # wheels of a package index
@pytest.mark.slow
def test_what_travels_is_installed_without_a_network(cifar, tmp_path):
    """results/gpu.md: made here, for this Python, and installed as the page says."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    arguments = [sys.executable, "-m", "benchmarks.carry", f"--data={cifar}", f"--python={here}"]
    completed = subprocess.run(
        [*arguments, f"--folder={tmp_path / '.carry'}"], cwd=ROOT, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert "MiB travel, the checkout included" in completed.stdout
    assert (tmp_path / ".carry/data").is_dir()
    (command,) = re.findall(r"^python3 (-m pip .*)$", report.PAGE.read_text(), re.MULTILINE)
    command = command.replace("/tmp/site", "site")
    subprocess.run(["bash", "-euc", f"{sys.executable} {command}"], cwd=tmp_path, check=True)
    assert (tmp_path / "site/jsonargparse").is_dir()
