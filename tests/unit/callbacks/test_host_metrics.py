"""callbacks/host_metrics.py: a line and a curve for each host, and what they say.

They come from the host's local rank 0.
"""

import re
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ranks
import torch
from pytorch_lightning import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sagemaker_lightning.callbacks import host_metrics
from sagemaker_lightning.callbacks.host_metrics import HostMetrics
from sagemaker_lightning.cli.lightning_cli import CommandLine, Logger
from sagemaker_lightning.contract.environment import SageMakerEnvironment

from app.train import APPLICATION

LINE = re.compile(
    r"host=(\S+) cpu=\d+\.\d% memory=\d+\.\dGiB network_in=\d+\.\dMiB/s network_out=\d+\.\dMiB/s"
    r"( gpu_memory=\d+\.\dGiB)?( gpu=\d+\.\d%)?"
)
TAGS = {"system/cpu", "system/memory", "system/network_in", "system/network_out"}


def fit(every_n_seconds: float, save_dir: str | None) -> None:
    """Train 16 batches on this rank, as host a or b."""
    metrics = HostMetrics(every_n_seconds, host="ab"[int(ranks.os.environ.get("GROUP_RANK", 0))])
    logger = Logger(save_dir) if save_dir else False
    ranks.trainer([metrics], logger=logger).fit(
        ranks.Regression(), ranks.Numbered(44, batch_size=5)
    )


def lines(output: str) -> list[str]:
    metric_lines = [line for line in output.splitlines() if line.startswith("host=")]
    assert all(LINE.fullmatch(line) for line in metric_lines), metric_lines
    return [LINE.fullmatch(line)[1] for line in metric_lines]


@pytest.mark.slow
def test_one_rank_of_every_host_writes(tmp_path: Path):
    ended = ranks.run(fit, 0, "../logs", nodes=[2, 2], folder=tmp_path)
    assert not any(rank.error for rank in ended), ended[0].output
    assert [lines(rank.output) for rank in ended] == [["a"] * 4, [], ["b"] * 4, []]
    for host in "ab":
        (folder,) = tmp_path.glob(f"logs/lightning_logs/version_0/system/{host}")
        events = EventAccumulator(str(folder)).Reload()
        assert set(events.Tags()["scalars"]) - {"system/gpu_memory", "system/gpu"} == TAGS
        assert [event.step for event in events.Scalars("system/cpu")] == [1, 2, 3, 4]
        assert all(event.value > 2**26 for event in events.Scalars("system/memory"))  # bytes
        assert all(0 <= event.value <= 100 for event in events.Scalars("system/cpu"))
    # Only rank 0 logs the model's metrics.
    assert len(list(tmp_path.glob("logs/lightning_logs/version_0/events.*"))) == 1
    assert sorted(path.name for path in (tmp_path / "logs/lightning_logs").iterdir()) == [
        "version_0"
    ]


def test_without_a_logger_there_are_lines_only(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit(0, None)
    assert lines(capsys.readouterr().out) == ["a"] * 16
    assert not list(tmp_path.iterdir())


def test_no_line_before_its_time(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit(1000, None)
    assert not lines(capsys.readouterr().out)


class Busy(Callback):
    """Keeps one core busy for a while in each step."""

    def on_train_batch_start(self, *_) -> None:
        deadline = time.process_time() + 0.2
        while time.process_time() < deadline:
            pass


@pytest.mark.slow
def test_the_share_of_a_busy_processor_is_above_0(tmp_path: Path, capsys):
    ranks.trainer([HostMetrics(0), Busy()], max_steps=2).fit(
        ranks.Regression(), ranks.Numbered(44, batch_size=5)
    )
    shares = [float(share) for share in re.findall(r" cpu=([\d.]+)%", capsys.readouterr().out)]
    assert len(shares) == 2 and min(shares) > 0


@pytest.mark.slow
def test_flags_and_what_the_environment_says(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two_hosts = {"hosts": ("algo-1", "algo-2"), "current_host": "algo-2"}
    command_line = CommandLine(
        SageMakerEnvironment(**two_hosts),
        ["--system.every_n_seconds=7", "--trainer.strategy=ddp", "--trainer.accelerator=cpu"],
        APPLICATION,
    )
    (callback,) = [
        entry for entry in command_line.trainer.callbacks if isinstance(entry, HostMetrics)
    ]
    assert (callback.every_n_seconds, callback.host) == (7.0, "algo-2")


@pytest.mark.slow
def test_on_s3(bucket, tmp_path: Path):
    ended = ranks.run(
        fit,
        0,
        bucket.uri("logs"),
        nodes=[1, 1],
        folder=tmp_path,
        variables=lambda node: bucket.variables,
    )
    assert not any(rank.error for rank in ended), ended[0].output
    for host in "ab":
        assert len(bucket.keys(f"logs/lightning_logs/version_0/system/{host}/events.")) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_gpu(tmp_path: Path, capsys):
    ranks.trainer([HostMetrics(0)], accelerator="gpu", max_steps=1).fit(
        ranks.Regression(), ranks.Numbered(44, batch_size=5)
    )
    assert re.search(r" gpu_memory=\d", capsys.readouterr().out)


def test_an_interface_may_come_and_go(tmp_path: Path, monkeypatch, capsys):
    """A machine that runs containers gets and loses their interfaces."""
    card = namedtuple("card", "bytes_recv bytes_sent")
    counters = [
        {"eth0": card(0, 0), "veth1": card(2**40, 2**40)},
        {"eth0": card(1, 1), "veth2": card(2**40, 2**40)},
    ]
    monkeypatch.setattr(
        psutil,
        "net_io_counters",
        lambda pernic: counters[min(len(calls), 1)] | {"lo": calls.append(1)},
    )
    calls = []
    ranks.trainer([HostMetrics(0)], max_steps=1).fit(
        ranks.Regression(), ranks.Numbered(44, batch_size=5)
    )
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("host="))
    assert "network_in=0.0MiB/s network_out=0.0MiB/s" in line and len(calls) > 1


def trainer_with(device: str = "cpu", **logger: object) -> SimpleNamespace:
    """Return what the callback asks a trainer for."""
    strategy = SimpleNamespace(broadcast=lambda value: value, root_device=torch.device(device))
    logger = SimpleNamespace(**logger) if logger else None
    return SimpleNamespace(strategy=strategy, local_rank=0, logger=logger, global_step=7)


class Machine:
    """A machine of which a test says how busy it is."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        self.network = {"eth0": (0, 0), "eth1": (5, 5)}
        self.asked_for_cpu_at = 0.0
        monkeypatch.setattr(host_metrics, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(psutil, "net_io_counters", self.cards)
        monkeypatch.setattr(psutil, "cpu_percent", self.cpu)
        memory = SimpleNamespace(used=3 * 2**29, total=2**35, available=2**34)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**33))
        monkeypatch.setattr(torch.cuda, "utilization", lambda device: 62)

    def cards(self, pernic: bool) -> dict:
        card = namedtuple("card", "bytes_sent bytes_recv")
        return {name: card(sent, received) for name, (received, sent) in self.network.items()}

    def cpu(self) -> float:
        """Return the seconds since the last question, as if they were the share."""
        seconds, self.asked_for_cpu_at = self.now - self.asked_for_cpu_at, self.now
        return seconds


def test_one_rank_of_a_host_speaks_for_it(tmp_path: Path, monkeypatch, capsys):
    """All ranks learn the number of the run from rank 0."""
    Machine(monkeypatch)
    asked = []
    metrics = HostMetrics(0)
    trainer = trainer_with(save_dir=str(tmp_path), name="mine", version=3)
    trainer.local_rank = 1
    trainer.strategy.broadcast = asked.append
    metrics.on_train_start(trainer, None)
    metrics.on_train_batch_end(trainer, None, None, None, 0)
    assert asked == [3] and metrics.writer is None and not capsys.readouterr().out


def test_a_line_is_of_the_interval_before_it(monkeypatch, capsys):
    machine = Machine(monkeypatch)
    metrics = HostMetrics(0.5, "algo-2")
    trainer = trainer_with()
    metrics.on_train_start(trainer, None)
    for machine.now in (100.25, 100.5):
        machine.network["eth0"] = (2**20, 3 * 2**20)
        metrics.on_train_batch_end(trainer, None, None, None, 0)
    says = "host=algo-2 cpu=0.5% memory=1.5GiB network_in=2.0MiB/s network_out=6.0MiB/s\n"
    assert capsys.readouterr().out == says
    for machine.now in (100.75, 101.5):
        metrics.on_train_batch_end(trainer, None, None, None, 0)
    says = "host=algo-2 cpu=1.0% memory=1.5GiB network_in=0.0MiB/s network_out=0.0MiB/s\n"
    assert capsys.readouterr().out == says
    metrics.every_n_seconds = 0
    metrics.on_train_start(trainer, None)  # and a clock that has not moved since
    metrics.on_train_batch_end(trainer, None, None, None, 0)
    assert "network_in=0.0MiB/s" in capsys.readouterr().out


@pytest.mark.parametrize(("installed", "gpu"), [(True, " gpu=62.0%"), (False, "")])
def test_a_gpu_has_its_own_values(monkeypatch, capsys, installed, gpu):
    Machine(monkeypatch)
    monkeypatch.setattr(host_metrics, "find_spec", lambda name: installed)
    metrics = HostMetrics(0)
    metrics.on_train_start(trainer_with("cuda"), None)
    metrics.on_train_batch_end(trainer_with("cuda"), None, None, None, 0)
    assert capsys.readouterr().out.endswith(f"MiB/s gpu_memory=7.0GiB{gpu}\n")


@pytest.mark.parametrize(
    ("every_n_seconds", "flushed", "name", "version", "folder"),
    [
        (0.5, 1, "mine", 3, "s3://b/logs/mine/version_3/system/a"),
        (7.9, 7, "", "all", "s3://b/logs/all/system/a"),
        (1000, 120, None, None, "s3://b/logs/system/a"),
    ],
)
def test_a_hosts_folder_and_when_it_is_written(
    monkeypatch, every_n_seconds, flushed, name, version, folder
):
    made = []

    class Writer:
        def __init__(self, folder: str, flush_secs: int) -> None:
            self.values = {}
            self.is_open = True
            made.append((folder, flush_secs, self))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.values[name] = value, step

        def close(self) -> None:
            self.is_open = False

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)
    machine = Machine(monkeypatch)
    metrics = HostMetrics(every_n_seconds, "a")
    trainer = trainer_with(save_dir="s3://b/logs/", name=name, version=version)
    metrics.on_train_start(trainer, None)
    machine.now += every_n_seconds
    metrics.on_train_batch_end(trainer, None, None, None, 0)
    ((found, seconds, writer),) = made
    assert (found, seconds) == (folder, flushed) and writer.is_open
    assert writer.values["system/cpu"] == (pytest.approx(every_n_seconds), 7)
    assert writer.values["system/memory"] == (3 * 2**29, 7)
    metrics.on_exception(trainer, None, ValueError())
    assert not writer.is_open and metrics.writer is None
