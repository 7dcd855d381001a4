"""Curves of interrupted runs in MLflow and Weights & Biases: each point once.

The server is MLflow's own, which SageMaker's plugin finds by an ARN. W&B is offline: its files are
read. CSVLogger's file, which tests/test_loggers.py looks at, says what the points are.
"""

import csv
import json
import os
import random
import re
import sqlite3
import subprocess
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_strangers
import warm
from containers import ROOT
from environments import packages_of, python_of

from sagemaker_lightning.callbacks import wandb_rows
from sagemaker_lightning.callbacks.mlflow_points import Points
from sagemaker_lightning.callbacks.wandb_rows import Rows

ARN = "arn:aws:sagemaker:eu-west-1:123456789012:mlflow-tracking-server/mine"
PROGRAM = ROOT / "tests/own_trainer.py"


class Server:
    """MLflow's server, as jobs and tests see it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.database = folder / "mlflow.sqlite"
        self.url = f"http://127.0.0.1:{port}"

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the environment of a job that logs to it."""
        return os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{packages_of('loggers')}",
            "HOME": str(folder),
            "TRACKING": ARN,
            "SAGEMAKER_MLFLOW_CUSTOM_ENDPOINT": self.url,
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "WANDB_CONSOLE": "off",
            "WANDB_ERROR_REPORTING": "false",
        }

    def curves(self, experiment: str) -> dict[str, Counter]:
        """Return the points of each run of an experiment, as (metric, step, value)."""
        with sqlite3.connect(self.database) as database:
            rows = database.execute(
                "select r.run_uuid, m.key, m.step, m.value from runs r "
                "join experiments e using (experiment_id) left join metrics m using (run_uuid) "
                "where e.name = ?",
                [experiment],
            ).fetchall()
        return {run: Counter(row[1:] for row in rows if row[0] == run) for run, *_ in rows}

    def status(self, run: str) -> str:
        """Return what state a run is in."""
        with sqlite3.connect(self.database) as database:
            query = "select status from runs where run_uuid = ?"
            return database.execute(query, [run]).fetchone()[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """MLflow's server."""
    folder = tmp_path_factory.mktemp("mlflow")
    command = [python_of("loggers"), ROOT / "tests/mlflow_server.py", folder]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield Server(folder, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


def written(file: Path, step: str) -> list[dict]:
    """Return the rows of a CSVLogger's file, with the name that the step has elsewhere."""
    rows = list(csv.DictReader(file.read_text().splitlines()))
    return [
        {step if name == "step" else name: float(value) for name, value in row.items() if value}
        for row in rows
    ]


def check(server: Server, experiment: str, folder: Path, file: Path) -> None:
    """Compare the curves in MLflow and in W&B with the file."""
    ((run, points),) = server.curves(experiment).items()
    assert server.status(run) == "FINISHED"
    assert points == Counter(
        (name, int(row["step"]), value)
        for row in written(file, "step")
        for name, value in row.items()
        if name != "step"
    )
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1  # one run, however many folders
    command = [python_of("loggers"), ROOT / "tests/wandb_file.py", files[-1]]
    rows = [json.loads(row) for row in subprocess.check_output(command, text=True).splitlines()]
    assert [row.pop("_step") for row in rows] == list(range(len(rows)))
    times = [row.pop("_timestamp") for row in rows if row.pop("_runtime")]
    assert times == sorted(times)
    assert rows == written(file, "trainer/global_step")


def interrupted(server: Server, folder: Path, *places: str, devices: int = 1) -> None:
    """Run a script with a Trainer of its own, interrupt it, and compare its curves."""
    variables = server.variables(folder) | {"EXPERIMENT": folder.name, "DEVICES": str(devices)}
    for position in (*places, ""):
        name, _, value = position.partition("=")
        run_variables = {name: value} if name else {}
        completed = warm.run(["python", PROGRAM, "tracked"], folder, variables | run_variables, 90)
        expected = {"KILL_AT": -9, "STOP_AT": 143}.get(name, 0)
        assert completed.returncode == expected, completed.stdout[-3000:]
        assert not re.search("^warning: ", completed.stdout, re.MULTILINE), completed.stdout
    check(server, folder.name, folder, folder / "curves/lightning_logs/version_0/metrics.csv")


@pytest.mark.slow
def test_a_script_of_ones_own(server: Server, tmp_path: Path):
    interrupted(server, tmp_path, "KILL_AT=1:4", "STOP_AT=2:1")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_a_script_at_random_places(server: Server, tmp_path: Path, seed: int):
    """Every other run has two ranks. Starting a finished run again changes nothing."""
    draw = random.Random(seed)
    devices = 1 + seed % 2
    batches = range(11 // devices)
    # Ranks stop at the batch after, where none is interrupted again.
    places = [(epoch, batch) for epoch in (1, 2) for batch in batches[::2]]
    places = sorted(draw.sample(places, draw.randint(1, 5)))
    names = [f"{draw.choice(('KILL_AT', 'STOP_AT'))}={epoch}:{batch}" for epoch, batch in places]
    interrupted(server, tmp_path, *names, devices=devices)
    interrupted(server, tmp_path, devices=devices)


@pytest.mark.thorough  # a script of ones own, above
@pytest.mark.slow
def test_the_command_line(server: Server, tmp_path: Path):
    """The model logs by hand as the training starts, too."""
    loggers = [
        {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}},
        {
            "class_path": "MLFlowLogger",
            "init_args": {"experiment_name": "cli", "tracking_uri": ARN},
        },
        {"class_path": "WandbLogger", "init_args": {"project": "cli", "offline": True}},
    ]
    flags = [
        "--model=strangers.Logging",
        "--data=strangers.Validated",
        f"--trainer.logger={json.dumps(loggers)}",
        "--trainer.log_every_n_steps=2",
        "--trainer.max_epochs=2",
    ]
    run = test_strangers.Run(tmp_path, *flags)
    variables = server.variables(tmp_path)
    assert run.start(KILL_AT="1:2", **variables) == -9, run.output[-3000:]
    run.finish(**variables)
    check(server, "cli", tmp_path, tmp_path / "logs/lightning_logs/version_0/metrics.csv")


# In one process, with a server that is made of a list ---------------------------------------------


class Metric:
    """A point, as of mlflow.entities."""

    def __init__(self, key: str, value: float, timestamp: int, step: int) -> None:
        self.key = key
        self.value = value
        self.timestamp = timestamp
        self.step = step

    def __iter__(self):
        return iter(vars(self).items())

    @classmethod
    def from_dictionary(cls, values: dict) -> "Metric":
        return cls(**values)


class Client:
    """An MlflowClient whose server keeps one run, as its tables do: no row is there twice."""

    def __init__(self) -> None:
        self.rows: list[tuple] = []
        self.status = "RUNNING"

    def get_run(self, run_id: str):
        names = dict.fromkeys(key for key, *_ in self.rows)
        return types.SimpleNamespace(data=types.SimpleNamespace(metrics=names, params={"lr": "1"}))

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [Metric(key, row[3], row[1], row[2]) for row in self.rows if row[0] == key]

    def log_batch(self, run_id: str, metrics=(), params=(), tags=(), **options) -> None:
        assert not params
        new = [(metric.key, metric.timestamp, metric.step, metric.value) for metric in metrics]
        self.rows += [row for row in new if row not in self.rows]

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status


@pytest.mark.parametrize("seed", range(20))
def test_a_server_gets_each_point_once(seed: int):
    """This holds for points of one millisecond, and for steps counted anew in each epoch."""
    draw = random.Random(seed)
    lr = types.SimpleNamespace(key="lr")
    batches = []
    for number in range(draw.randint(2, 40)):
        keys = draw.sample("abc", draw.randint(1, 3))
        step = number % 7 if seed % 2 else number // 2
        batches.append([Metric(key, draw.choice((0.5, 1.5)), 1000, step) for key in keys])
    server = Client()
    saved = 0
    counts = None
    batches_end = 0
    while batches_end < len(batches):
        client = Points(server)
        if counts is not None:
            client.wait("run")
            client.log_batch("run", [Metric("begun", 1.0, 1000, 0)], [lr])
            client.continue_from("run", counts)
        batches_end = draw.randint(saved, len(batches)) if counts is not None else len(batches) // 2
        for number in range(saved, batches_end):
            client.log_batch("run", batches[number])
            if draw.random() < 0.2 or counts is None:
                saved = number + 1
                counts = client.state("run")
    expected = Counter(
        (metric.key, metric.step, metric.value) for batch in batches for metric in batch
    )
    assert Counter((row[0], row[2], row[3]) for row in server.rows) == expected


def test_a_server_that_has_lost_points_is_said(capsys):
    server = Client()
    client = Points(server)
    client.log_batch("run", [Metric("loss", 1.0, 5, 0)])
    state = client.state("run")
    server.rows.clear()
    Points(server).continue_from("run", state)
    assert "MLflow's run run lacks points of the interrupted run" in capsys.readouterr().out


def test_what_the_clock_logs_is_not_there_twice():
    """Such points come at other steps than in the interrupted run."""
    server = Client()
    client = Points(server)
    for step in (3, 6, 9):
        client.log_batch("run", [Metric("cpu", 1.0, step, step)])
    again = Points(server)
    again.continue_from("run", {})
    for step in (2, 5, 8, 11):
        again.log_batch("run", [Metric("cpu", 1.0, step, step)])
    assert [row[2] for row in server.rows] == [3, 6, 9, 11]


class Run:
    """A run of W&B; the server has some of its rows when it is resumed."""

    id = "mine"

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows
        self.partial: dict = {}

    @property
    def step(self) -> int:
        return len(self.rows)

    def log(self, data: dict, step: int, commit: bool) -> None:
        assert step == len(self.rows)
        self.partial |= data
        if commit:
            self.rows.append({name: self.partial[name] for name in self.partial if name[0] != "_"})
            self.partial = {}


@pytest.mark.parametrize("seed", range(20))
def test_a_run_has_each_row_once(tmp_path: Path, seed: int):
    """W&B sends rows in the background: any number of the last ones may be lost.

    The file, too, may be an older one.
    """
    draw = random.Random(seed)
    expected = [{"loss": draw.random(), "epoch": number // 9} for number in range(30)]
    saved = 0
    state = None
    server_rows = []
    rows_end = 0
    path = tmp_path / "wandb-mine.jsonl"
    while rows_end < len(expected):
        run = Run(server_rows)
        rows = Rows(run, path, waits=state is not None)
        if state is not None:
            run.log({"begun": 1.0})
            rows.continue_from(**state)
            assert path.stat().st_size == state["size"]
        rows_end = draw.randint(saved, len(expected)) if state else len(expected) // 2
        for number in range(saved, rows_end):
            row = expected[number]
            if draw.random() < 0.3:
                run.log({"loss": row["loss"]}, commit=False)
                run.log({"epoch": row["epoch"]})
            else:
                run.log(row)
            if draw.random() < 0.2 or state is None:
                saved = number + 1
                state = rows.state()
        rows.file.close()
        os.truncate(path, draw.randint(0, path.stat().st_size))
        server_rows = (
            run.rows if rows_end == len(expected) else run.rows[: draw.randint(0, len(run.rows))]
        )
        server_rows = server_rows if seed % 2 or rows_end == len(expected) else []
    assert run.rows == expected


def test_rows_that_are_lost_are_said_and_so_is_what_cannot_be_kept(
    tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.setattr(wandb_rows, "TAIL_BYTES", 100)
    path = tmp_path / "wandb-mine.jsonl"
    rows = Rows(Run([]), path, waits=False)
    rows.log({"loss": 1.0, "picture": object()})
    assert "W&B: picture is a object, which is sent once" in capsys.readouterr().out
    assert json.loads(path.read_text() or rows.state()["end"])[2]["loss"] == 1.0
    for number in range(9):
        rows.log({"loss": number})
    state = rows.state()
    assert len(state["end"]) == 100 and state["rows"] == 10
    path.unlink()
    run = Run([{}] * 9)
    Rows(run, path, waits=True).continue_from(**state)
    assert "lacks rows of the interrupted run" in capsys.readouterr().out
    assert run.rows[9:] == [{"loss": 8}] and len(path.read_text().splitlines()) == 1
