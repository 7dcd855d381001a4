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
import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_strangers
import torch
import warm
from containers import ROOT
from environments import packages_of, python_of
from pytorch_lightning.loggers import MLFlowLogger, WandbLogger

from sagemaker_lightning.callbacks import loggers, wandb_rows
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
        self.stage = "active"

    def get_run(self, run_id: str):
        names = dict.fromkeys(key for key, *_ in self.rows)
        return types.SimpleNamespace(
            data=types.SimpleNamespace(metrics=names, params={"lr": "1"}),
            info=types.SimpleNamespace(lifecycle_stage=self.stage),
        )

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


class Recorder(Client):
    """It also keeps the calls, which it answers with an operation in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def log_batch(self, run_id: str, metrics=(), params=(), tags=(), **options) -> "Recorder":
        super().log_batch(run_id, metrics)
        steps = [(metric.key, metric.step) for metric in metrics]
        self.calls.append((steps, [param.key for param in params], list(tags), options))
        return self

    def log_metric(self, *arguments, **options) -> str:
        self.calls.append((*arguments, options))
        return "sent"


def test_what_is_sent_at_once_and_what_waits():
    """Points wait until it is known whether they come again; parameters and tags do not."""
    server = Recorder()
    client = Points(server)
    client.wait("run")
    parameters = [types.SimpleNamespace(key=key) for key in ("lr", "batch")]
    client.log_batch("run", [Metric("loss", 1.0, 5, 0)], parameters, synchronous=False)
    client.log_batch("run", tags=["mine"])
    client.log_batch("run", params=parameters[:1])
    assert server.calls == [([], ["batch"], [], {"synchronous": False}), ([], [], ["mine"], {})]
    assert not client.state("run") and server.waits == 2
    client.log_held()
    assert client.log_batch("run") is None
    assert server.calls[2:] == [([("loss", 0)], [], [], {"synchronous": False})]
    assert client.state("run") == {"loss": 1} and server.waits == 3
    assert client.state("run") == {"loss": 1} and server.waits == 3
    client.wait("run")  # a second training of this process
    client.log_batch("run", [Metric("loss", 1.0, 6, 1)], parameters[:1])
    client.continue_from("run", {"loss": 0})
    client.repeat("run")
    metrics = [Metric("loss", 1.0, 6, 1), Metric("loss", 1.0, 7, 2)]
    assert client.log_batch("run", metrics) is server  # somebody may wait for it
    assert [row[2] for row in server.rows] == [0, 1, 1, 2]


def test_points_of_one_millisecond_are_a_millisecond_apart():
    server = Client()
    client = Points(server)
    for step, moment in enumerate((1000, 1000, 1000, 1007)):
        client.log_batch("run", [Metric("loss", 1.0, moment, step)])
    assert [row[1] for row in server.rows] == [1000, 1001, 1002, 1007]


def test_a_second_training_of_a_process_sends_at_once():
    """Its process knows which points the server has."""
    server = Client()
    client = Points(server)
    client.wait("run")
    client.continue_from("run", {})
    for step in range(2):
        client.wait("run")
        client.log_batch("run", [Metric("loss", 1.0, 5, step)])
        assert len(server.rows) == step + 1


def test_what_a_program_logs_before_its_training_is_sent_once():
    server = Client()
    client = Points(server)
    for step in (0, 1):
        client.log_batch("run", [Metric("val", 1.0, 5, step)])
    again = Points(server)
    again.repeat("run")
    for step in (0, 1, 2):
        again.log_batch("run", [Metric("val", 1.0, 5, step)])
    assert [row[2] for row in server.rows] == [0, 1, 2]


def test_a_point_by_itself_has_the_time_of_now(monkeypatch):
    entities = types.SimpleNamespace(Metric=Metric)
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    server = Recorder()
    client = Points(server)
    before = time.time() * 1000
    client.log_metric("run", "acc", 0.5)
    client.log_metric("run", "acc", 0.6, step=3, synchronous=True)
    (key, moment, step, value), (*_, later_step, _) = server.rows
    assert (key, step, value, later_step) == ("acc", 0, 0.5, 3)
    assert before - 1 <= moment <= time.time() * 1000 + 1
    assert [call[-1] for call in server.calls] == [{}, {"synchronous": True}]
    assert client.log_metric("run", "acc", 0.5, 17, 4, dataset_name="x") == "sent"
    assert server.calls[2:] == [("run", "acc", 0.5, 17, 4, {"dataset_name": "x"})]
    assert client.stage == "active"  # all else is the client's own


class MlflowError(Exception):
    """As of mlflow.exceptions."""

    def __init__(self, code: str) -> None:
        self.error_code = code


def mlflow_logger(client: Client, run_id: str | None) -> MLFlowLogger:
    """Return a logger of MLflow, which is not installed here."""
    logger = MLFlowLogger.__new__(MLFlowLogger)
    logger._mlflow_client, logger._run_id = client, run_id
    logger._experiment_name, logger._tracking_uri = "mine", ARN
    return logger


@pytest.fixture
def mlflow(monkeypatch) -> list[str]:
    """The addresses that MLflow was given."""
    addresses = []
    exceptions = types.SimpleNamespace(MlflowException=MlflowError)
    module = types.SimpleNamespace(set_tracking_uri=addresses.append, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", exceptions)
    return addresses


def test_a_logger_of_mlflow_goes_on_in_the_run(mlflow: list[str], tmp_path: Path, capsys):
    server = Client()
    logger = mlflow_logger(server, "run")
    loggers.prepare_files([logger], [])
    assert logger._mlflow_client is server  # no checkpoints, nothing to continue
    loggers.prepare_files([logger], [], tmp_path)
    for step in (0, 1):
        logger._mlflow_client.log_batch("run", [Metric("loss", 1.0, 5, step)])
        if step == 0:
            states = loggers.save_states([logger])
    assert states[0]["points"] == {"loss": 1} and states[0]["version"] == "run"
    assert "points" not in loggers.save_states([mlflow_logger(server, None)])[0]
    server.status = "FAILED"
    for first in (False, True):
        logger = mlflow_logger(server, None)
        loggers.prepare_files([logger], states, tmp_path)
        assert logger._run_id == "run" and mlflow == [ARN]
        mlflow.clear()
        logger._mlflow_client.log_batch("run", [Metric("begun", 1.0, 5, 0)])
        loggers.continue_files([logger], states, 0, first)
        assert server.status == ("RUNNING" if first else "FAILED")
    for step in (1, 2):
        logger._mlflow_client.log_batch("run", [Metric("loss", 1.0, 5, step)])
    assert [row[2] for row in server.rows] == [0, 1, 2]
    loggers.begin_files([logger := mlflow_logger(server, "run")])
    logger._mlflow_client.wait("run")
    logger._mlflow_client.log_batch("run", [Metric("loss", 1.0, 5, 3)])
    loggers.begin_files([logger])
    assert [row[2] for row in server.rows] == [0, 1, 2, 3] and not capsys.readouterr().out


def test_a_validation_before_the_training_is_not_sent_twice(mlflow: list[str], tmp_path: Path):
    server = Client()
    server.rows = [("val", 5, 0, 1.0)]
    state = {"kind": "MLFlowLogger", "name": "mine", "version": "run", "points": {}}
    logger = mlflow_logger(server, None)
    loggers.prepare_files([logger], [state], tmp_path, trains=False)
    for step in (0, 1):
        logger._mlflow_client.log_batch("run", [Metric("val", 1.0, 5, step)])
    assert [row[2] for row in server.rows] == [0, 1]


@pytest.mark.parametrize("trains", [False, True])
def test_another_run_of_mlflow_is_said_by_a_training(mlflow, tmp_path: Path, capsys, trains):
    state = {"kind": "MLFlowLogger", "name": "mine", "version": "run", "points": {}}
    logger = mlflow_logger(Client(), "other")
    loggers.prepare_files([logger], [state], tmp_path, trains=trains)
    says = "this run logs to run_id other, the interrupted run logged to run_id run, so"
    assert (says in capsys.readouterr().out) == trains and logger._run_id == "other"


@pytest.mark.parametrize("run_id", [None, "../run", "deleted", "gone"])
def test_a_run_of_mlflow_that_is_not_there_begins_anew(mlflow, tmp_path: Path, capsys, run_id):
    server = Client()
    server.stage = "deleted" if run_id == "deleted" else "active"
    if run_id == "gone":
        server.get_run = lambda run_id: (_ for _ in ()).throw(
            MlflowError("RESOURCE_DOES_NOT_EXIST")
        )
    state = {"kind": "MLFlowLogger", "name": "mine", "version": run_id, "points": {}}
    logger = mlflow_logger(server, None)
    loggers.prepare_files([logger], [state], tmp_path)
    assert logger._run_id is None
    loggers.continue_files([logger], [state], 0, True)
    says = f"warning: MLflow has no run {run_id}, which the interrupted run logged to: the curves"
    assert capsys.readouterr().out.startswith(says) == (run_id in ("deleted", "gone"))


def test_a_server_of_mlflow_that_refuses_is_an_error(mlflow, tmp_path: Path):
    server = Client()
    server.get_run = lambda run_id: (_ for _ in ()).throw(MlflowError("PERMISSION_DENIED"))
    state = {"kind": "MLFlowLogger", "name": "mine", "version": "run", "points": {}}
    with pytest.raises(MlflowError):
        loggers.prepare_files([mlflow_logger(server, None)], [state], tmp_path)


def test_what_the_clock_logs_is_not_there_twice(capsys):
    """Such points come at other steps than in the interrupted run."""
    server = Client()
    client = Points(server)
    for step in (3, 6, 9):
        client.log_batch("run", [Metric("cpu", 1.0, step, step)])
    again = Points(server)
    again.continue_from("run", {})
    for step in (2, 5, 8, 11, 12):
        again.log_batch("run", [Metric("cpu", 1.0, step, step)])
    assert [row[2] for row in server.rows] == [3, 6, 9, 11, 12]
    last = Points(server)
    last.continue_from("run", again.state("run"))
    last.log_batch("run", [Metric("cpu", 1.0, 1, 12)])
    assert [row[2] for row in server.rows] == [3, 6, 9, 11, 12, 12] and not capsys.readouterr().out


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
    rows.log({"loss": torch.tensor(1.0), "picture": object()})
    assert "W&B: picture is a object, which is sent once" in capsys.readouterr().out
    assert json.loads(path.read_text() or rows.state()["end"])[2]["loss"] == 1.0
    for number in range(9):
        rows.log({"loss": number} | ({} if number else {"picture": object()}))
    state = rows.state()
    assert not capsys.readouterr().out
    assert len(state["end"]) == 100 and state["rows"] == 10
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (0, 1):  # whole lines that are left of the file
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:9])
        run = Run([{}] * 9)
        Rows(run, path, waits=True).continue_from(**state)
        assert "lacks rows of the interrupted run" in capsys.readouterr().out
        assert run.rows[9:] == [{"loss": 8}]
        assert path.read_bytes().splitlines(keepends=True) == [*lines[:kept], lines[-1]]


class Steps:
    """A run of W&B that keeps the calls."""

    id = "mine"
    step = 0

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def log(self, data: dict, step: int, commit: bool | None) -> None:
        named = {name: data[name] for name in data if name[0] != "_"}
        self.calls.append((named, step, commit))


def test_a_step_of_ones_own_is_the_row(tmp_path: Path):
    """As W&B has it: a row is complete when a later one begins."""
    run = Steps()
    rows = Rows(run, tmp_path / "new/folder/wandb-mine.jsonl", waits=False)
    before = time.time()
    run.log({"a": 1}, step=0)
    run.log({"b": 2}, step=0)
    run.log({"a": 3}, step=4, commit=True)
    run.log({"late": 4}, step=4)
    run.log({"c": 5}, commit=False)
    run.log({"d": 6})
    assert run.calls == [
        ({"a": 1}, 0, False),
        ({"b": 2}, 0, False),
        ({"a": 3}, 4, True),
        ({"late": 4}, 4, None),  # W&B says that it ignores it
        ({"c": 5}, 5, False),
        ({"d": 6}, 5, True),
    ]
    state = rows.state()
    kept = [json.loads(line) for line in state["end"].splitlines()]
    assert [(row, complete) for row, complete, _ in kept] == [
        (0, False), (0, False), (4, True), (5, False), (5, True)
    ]  # fmt: skip
    assert state["rows"] == 6 and before <= kept[0][2]["_timestamp"] <= time.time()


def test_rows_are_on_the_disk_when_a_checkpoint_names_them(tmp_path: Path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda number: sizes.append(os.fstat(number).st_size))
    rows = Rows(Run([]), tmp_path / "wandb-mine.jsonl", waits=False)
    rows.log({"loss": 1.0})
    assert sizes == [rows.state()["size"]] and sizes[0] > 0
    rows.log({"text": "x" * 70_000})
    assert len(rows.state()["end"]) == 64 * 1024  # a checkpoint stays small


def test_rows_that_nobody_continues_begin_a_new_file(tmp_path: Path):
    path = tmp_path / "wandb-mine.jsonl"
    path.write_text("[0, true, {}]\n")
    run = Run([])
    rows = Rows(run, path, waits=True)
    run.log({"loss": 1.0})
    assert not run.rows and path.stat().st_size > 0  # it waits
    for _ in range(2):
        rows.log_held()
        rows.continue_from(rows=0, size=0, end="")  # a second training of this process
        run.log({"loss": 2.0})
    assert run.rows == [{"loss": 1.0}, {"loss": 2.0}, {"loss": 2.0}]
    assert rows.state()["rows"] == 3
    assert [json.loads(line)[0] for line in path.read_text().splitlines()] == [0, 1, 2]
    Rows(Run([]), path, waits=False)
    assert not path.read_text()


@pytest.fixture
def wandb(monkeypatch) -> types.SimpleNamespace:
    """The module of W&B, which is not installed here."""
    module = types.SimpleNamespace(run=None, log=None)
    for name in ("wandb", "wandb.sdk.lib", "wandb.wandb_run"):
        monkeypatch.setitem(sys.modules, name, module)
    module.RunDisabled = module.Run = object
    return module


def test_a_program_may_log_by_the_module(wandb, tmp_path: Path):
    """`wandb.log` is the run's if there is one."""
    for current in (False, True):
        run = Run([])
        wandb.run, wandb.log = (run if current else Run([])), None
        rows = Rows(run, tmp_path / "wandb-mine.jsonl", waits=False)
        assert (wandb.log == rows.log) == current


def wandb_logger(run: Run | None, **options) -> WandbLogger:
    logger = WandbLogger.__new__(WandbLogger)
    logger._experiment, logger._id, logger._project = run, None, "mine"
    logger._wandb_init, logger._offline = options, False
    return logger


def test_a_logger_of_wandb_goes_on_in_the_run(wandb, tmp_path: Path, capsys):
    logger = wandb_logger(run := Run([]))
    loggers.prepare_files([logger], [])
    assert type(logger) is WandbLogger  # no checkpoints, nothing to continue
    loggers.prepare_files([logger], [], tmp_path)
    assert "rows" not in loggers.save_states([logger])[0]  # it has logged nothing
    for number in range(3):
        logger.experiment.log({"loss": number})
        if number == 0:
            states = loggers.save_states([logger])
    assert states[0]["rows"] == 1 and states[0]["version"] == "mine"
    assert [path.name for path in wandb_rows.files(tmp_path)] == ["wandb-mine.jsonl"]
    logger.rows.file.close()
    for first in (False, True):
        made = Run(run.rows[:1])
        wandb.init = lambda id, made=made: made
        logger = wandb_logger(None)
        loggers.prepare_files([logger], states, tmp_path)
        assert logger._wandb_init == {"id": "mine"}
        loggers.continue_files([logger], states, 0, first)
        logger.experiment.log({"loss": 7})
        assert made.rows[1:] == ([{"loss": 7}] if first else [])
    loggers.prepare_files([logger], states, tmp_path)  # a second training of this process
    logger.experiment.log({"loss": 8})
    assert made.rows[1:] == [{"loss": 7}, {"loss": 8}] and not capsys.readouterr().out
    loggers.prepare_files([logger := wandb_logger(None)], states, tmp_path)
    wandb.init = lambda id: made
    logger.experiment.log({"loss": 9})
    assert len(made.rows) == 3
    loggers.begin_files([logger])
    assert made.rows[3:] == [{"loss": 9}]


def test_a_run_that_is_disabled_or_copies_tensorboard_is_left_alone(wandb, tmp_path: Path):
    logger = wandb_logger(run := Run([]), sync_tensorboard=True)
    loggers.prepare_files([logger], [], tmp_path)
    assert type(logger) is WandbLogger
    logger = wandb_logger(run)
    run.disabled = True
    loggers.prepare_files([logger], [], tmp_path)
    assert logger.experiment is run and logger.rows is None and not list(tmp_path.iterdir())
    loggers.begin_files([logger])
    run.disabled = False
    first = logger.experiment and logger.rows
    assert logger.experiment and logger.rows is first


def test_another_run_of_wandb_is_said(wandb, tmp_path: Path, capsys):
    state = {"kind": "WandbLogger", "name": "mine", "version": "other"}
    loggers.prepare_files([wandb_logger(Run([]))], [state], tmp_path)
    says = "this run logs to id mine, the interrupted run logged to id other, so their"
    assert says in capsys.readouterr().out
