"""callbacks/host_metrics.py: a line and a curve for each host, and what they say.

They come from the host's local rank 0.
"""

import re
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import ranks
import torch
from pytorch_lightning import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
    """Interfaces of containers come and go on a machine that runs containers."""
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
