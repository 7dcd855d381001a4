"""callbacks/loggers/mlflow_points.py: a run of MLflow continues, each point once.

In one process, with a server that is made of a list. test_tracking.py has MLflow's own.
"""

import random
import sys
import time
import types
from collections import Counter
from pathlib import Path

import pytest
from pytorch_lightning.loggers import MLFlowLogger

from sagemaker_lightning.callbacks import loggers
from sagemaker_lightning.callbacks.loggers.mlflow_points import Points

ARN = "arn:aws:sagemaker:eu-west-1:123456789012:mlflow-tracking-server/mine"


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
    """This holds for points of one millisecond, and for steps counted again in each epoch."""
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


def test_a_logger_of_mlflow_continues_in_the_run(mlflow: list[str], tmp_path: Path, capsys):
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
