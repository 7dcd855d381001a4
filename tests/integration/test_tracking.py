"""Curves of interrupted runs in MLflow and Weights & Biases: each point once.

The server is MLflow's own, which SageMaker's plugin finds by an ARN. W&B is offline: its files are
read. CSVLogger's file, which test_logger_runs.py looks at, says what the points are.
"""

import csv
import json
import os
import random
import re
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from containers import ROOT
from environments import packages_of, python_of

ARN = "arn:aws:sagemaker:eu-west-1:123456789012:mlflow-tracking-server/mine"
PROGRAM = ROOT / "tests/support/own_trainer.py"


class Server:
    """MLflow's server, as jobs and tests see it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.database = folder / "mlflow.sqlite"
        self.url = f"http://127.0.0.1:{port}"

    def variables(self, folder: Path) -> dict[str, str]:
        """Return the environment of a job that logs to it."""
        return os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}:{packages_of('loggers')}",
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
    command = [python_of("loggers"), ROOT / "tests/support/mlflow_server.py", folder]
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
    command = [python_of("loggers"), ROOT / "tests/support/wandb_file.py", files[-1]]
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
        # The program removes the variables that this test interrupts it by.
        others = "^warning: (?!the environment variable (KILL|STOP)_AT changes)"
        assert not re.search(others, completed.stdout, re.MULTILINE), completed.stdout
    check(server, folder.name, folder, folder / "curves/lightning_logs/version_0/metrics.csv")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_users_own_script(server: Server, tmp_path: Path):
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
