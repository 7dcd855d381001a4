"""How busy each host is while it trains: processor, memory, network and GPU."""

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import psutil
import torch
from pytorch_lightning import Callback, LightningModule, Trainer

from sagemaker_lightning.contract.log import log

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class HostMetrics(Callback):
    """Writes every few seconds of training how busy this host is.

    Local rank 0 of every node writes it. A line is `host=algo-2 cpu=87.5% memory=3.1GiB
    network_in=0.2MiB/s network_out=11.9MiB/s`; on a GPU it has gpu_memory and, if the package
    pynvml is installed, gpu. TensorBoard gets the same values as system/cpu, ..., in a folder of
    this host below the logger's folder: <save_dir>/<name>/version_<n>/system/<host>. CPU and memory
    are those of the whole machine, the network is the sum of all its interfaces except loopback,
    and the GPU is that of local rank 0.

    Args:
        every_n_seconds: Seconds between two lines of system metrics.
        host: Name of this host in the metrics, and of its folder. On several hosts, give each its
            own: `SageMakerEnvironment.read().current_host`.
    """

    def __init__(self, every_n_seconds: float = 30.0, host: str = "localhost") -> None:
        self.every_n_seconds = every_n_seconds
        self.host = host
        self.writer: SummaryWriter | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open this host's folder, and start the first interval."""
        # All ranks take part: rank 0 chose the number of this run, one that was free on its host.
        version = trainer.strategy.broadcast(getattr(trainer.logger, "version", None))
        self.due = float("inf")
        if trainer.local_rank:
            return
        logger = trainer.logger
        if logger is not None and (save_dir := getattr(logger, "save_dir", None)):
            # Imported here: it takes 0.2 s, which only a logger needs.
            from torch.utils.tensorboard import SummaryWriter

            run = f"version_{version}" if isinstance(version, int) else version
            folder = "/".join(
                part
                for part in (
                    str(save_dir).rstrip("/"),
                    logger.name,
                    run,
                    "system",
                    self.host,
                )
                if part
            )
            self.writer = SummaryWriter(
                folder, flush_secs=max(1, int(min(self.every_n_seconds, 120)))
            )
        psutil.cpu_percent()  # later calls return the share since the call before
        self._start_interval()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a line if the interval is over."""
        if time.monotonic() < self.due:
            return
        values = self._measure(trainer.strategy.root_device)
        parts = [
            f"host={self.host}",
            *(f"{name}={_with_unit(name, value)}" for name, value in values.items()),
        ]
        log.info(" ".join(parts))
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(f"system/{name}", value, trainer.global_step)
        self._start_interval()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the values that TensorBoard has not written yet."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the values that TensorBoard has not written yet."""
        if self.writer:
            self.writer.close()
            self.writer = None

    def _start_interval(self) -> None:
        self.started = time.monotonic()
        self.counts_at_start = _network_bytes()
        self.due = self.started + self.every_n_seconds

    def _measure(self, device: torch.device) -> dict[str, float]:
        """Return the metrics by name.

        Shares are in percent, memory in bytes, network in bytes per second.
        """
        seconds = max(time.monotonic() - self.started, 1e-9)
        counts = _network_bytes()
        # Only interfaces that were there all the time: a container's may come or go.
        cards = counts.keys() & self.counts_at_start.keys()
        rates = [
            sum(counts[card][k] - self.counts_at_start[card][k] for card in cards) / seconds
            for k in (0, 1)
        ]
        values = {"cpu": psutil.cpu_percent(), "memory": psutil.virtual_memory().used}
        values |= {"network_in": rates[0], "network_out": rates[1]}
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            values["gpu_memory"] = total - free
            if find_spec("pynvml"):
                values["gpu"] = torch.cuda.utilization(device)
        return values


def _network_bytes() -> dict[str, tuple[int, int]]:
    """Return the bytes received and sent by each interface since the machine started.

    Loopback is left out.
    """
    counts = psutil.net_io_counters(pernic=True)
    return {
        name: (count.bytes_recv, count.bytes_sent) for name, count in counts.items() if name != "lo"
    }


def _with_unit(name: str, value: float) -> str:
    """Return a value as text with its unit."""
    if name.endswith("memory"):
        return f"{value / 2**30:.1f}GiB"
    return f"{value / 2**20:.1f}MiB/s" if name.startswith("network") else f"{value:.1f}%"
