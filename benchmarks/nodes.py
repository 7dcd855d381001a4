"""Trainings on one or two "nodes" of this machine, of one core each, that take turns.

A node is a launcher with a core and a host name of its own. The nodes are connected by the loopback
interface and gloo. As in `turns`, other work of the machine affects all of them, and every
measurement has new processes.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean

from benchmarks import report
from benchmarks.ranks import END, EXCHANGE, SILENT, WARMUP_STEPS, Rank, Turn
from benchmarks.training import RandomDataModule
from sagemaker_lightning.contract.rendezvous import free_port

HOSTS = ("127.0.0.1", "localhost")  # two names of this machine, as SageMaker sorts them
ROUNDS = 4  # turns of each; the first is not counted
# The turns of a round: which training, on how many nodes, with which order to the ranks. Turns that
# are compared most directly stand next to each other.
TURNS = (
    ("ours", 1, EXCHANGE),
    ("plain", 1, EXCHANGE),
    ("ours", 2, EXCHANGE),
    ("plain", 2, EXCHANGE),
    ("ours", 2, SILENT),
    ("plain", 2, SILENT),
)
Round = dict[tuple[str, int, str], Turn]


@dataclass(frozen=True)
class Setting:
    """What all trainings have in common."""

    steps: int
    """Timed steps of a turn."""
    batch_size: int
    """Images of a step, per rank."""
    flags: list[str]
    """More flags of our training."""


class Training:
    """A training whose ranks are ready for their first turn."""

    def __init__(self, folder: Path, setting: Setting, connections: list[Connection]) -> None:
        self.folder = folder
        self.connections = connections
        self.nodes = len(connections)
        self.all_steps = WARMUP_STEPS + setting.steps

    def turn(self, order: str) -> Turn:
        """Let the ranks train for a turn, and return their common result."""
        sent_before = sent()
        for connection in self.connections:
            connection.send(order)
        try:
            turns = [connection.recv() for connection in self.connections]
        except (EOFError, ConnectionError):
            fail(self.folder)
        means = (
            mean(getattr(turn, name) for turn in turns)
            for name in ("seconds", "waited", "overlapped")
        )
        return Turn(
            sum(turn.rate for turn in turns),
            *means,
            (sent() - sent_before) / self.nodes / self.all_steps,
        )


@contextmanager
def training(name: str, nodes: int, folder: Path, setting: Setting) -> Iterator[Training]:
    """Start a training, and end it when the block ends."""
    folder = folder / f"{name}-{nodes}"
    folder.mkdir()
    port = free_port(HOSTS[0])
    connections = []
    processes = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        server.settimeout(1)
        try:
            for node in range(nodes):
                command_line = command(name, node, nodes, port, folder / "socket", setting)
                processes.append(_launch(command_line, node, nodes, port, folder / str(node)))
            while len(connections) < nodes:
                try:
                    connections.append(Connection(server.accept()[0].detach()))
                except TimeoutError:
                    if any(process.poll() is not None for process in processes):
                        fail(folder)
            yield Training(folder, setting, connections)
        finally:
            _end(connections, processes)


def command(
    name: str, node: int, nodes: int, port: int, address: Path, setting: Setting
) -> list[str]:
    """Return the command line of a node.

    Ours is that of SageMaker's toolkit; the plain loop's is torchrun's.
    """
    if name == "plain":
        rendezvous = [
            f"--nnodes={nodes}",
            f"--node-rank={node}",
            f"--master-addr={HOSTS[0]}",
            f"--master-port={port}",
        ]
        program = [
            "-m",
            "benchmarks.plain",
            str(address),
            str(setting.steps),
            str(setting.batch_size),
        ]
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=1",
            *rendezvous,
            *program,
        ]
    data_class = f"{RandomDataModule.__module__}.{RandomDataModule.__name__}"
    flags = [
        f"--data={data_class}",
        f"--data.batch_size={setting.batch_size}",
        "--trainer.accelerator=cpu",
    ]
    flags += ["--trainer.devices=1", f"--trainer.callbacks+={Rank.__module__}.{Rank.__name__}"]
    flags += [
        f"--trainer.callbacks.address={address}",
        f"--trainer.callbacks.steps={setting.steps}",
    ]
    return [sys.executable, str(report.ROOT / "app/train_multi_node.py"), *flags, *setting.flags]


def _launch(
    command_line: list[str], node: int, nodes: int, port: int, folder: Path
) -> subprocess.Popen:
    """Start a node's launcher on its core, in a folder and with a log of its own."""
    folder.mkdir()
    kept_variables = {
        name: value for name, value in os.environ.items() if not name.startswith("SM_")
    }
    node_variables = {
        "SM_HOSTS": json.dumps(HOSTS[:nodes]),
        "SM_CURRENT_HOST": HOSTS[node],
        "GLOO_SOCKET_IFNAME": "lo",
    }
    node_variables |= {"MASTER_PORT": str(port)} if nodes > 1 else {}  # the usual one may be in use
    node_variables |= {"PYTHONPATH": str(report.ROOT), "OMP_NUM_THREADS": "1"}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[node]})  # the child inherits it
    try:
        with (folder / "log").open("w") as log:
            return subprocess.Popen(
                command_line,
                env=kept_variables | node_variables,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    finally:
        os.sched_setaffinity(0, cores)


def _end(connections: list[Connection], processes: list[subprocess.Popen]) -> None:
    """Tell the ranks to end, and wait until their launchers have ended."""
    for connection in connections:
        with suppress(OSError):  # one that has ended already
            connection.send(END)
    for process in processes:
        try:
            process.wait(timeout=20 if connections else 0)
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()  # nothing, if it has ended
            process.wait()


def fail(folder: Path) -> None:
    """Show the launchers' last output, and exit."""
    last_output = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("*/log")))
    raise SystemExit(f"{last_output}\nerror: {folder.name}: a training ended, see above")


def measure(setting: Setting) -> list[Round]:
    """Return the rounds that count, of new processes.

    All trainings are alive, and one at a time is awake.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trainings = {
            (name, nodes): stack.enter_context(training(name, nodes, Path(folder), setting))
            for name, nodes in dict.fromkeys(turn[:2] for turn in TURNS)
        }
        rounds = [
            {turn: trainings[turn[:2]].turn(turn[2]) for turn in TURNS} for _ in range(ROUNDS)
        ]
    return rounds[1:]


def check(setting: Setting) -> None:
    """Exit with one line if this machine, or an epoch, is too small."""
    if len(os.sched_getaffinity(0)) < len(HOSTS):
        raise SystemExit("error: found one usable core, expected two: one for each node")
    needed = 2 * ROUNDS * (WARMUP_STEPS + setting.steps)
    steps_an_epoch = RandomDataModule().num_samples // (len(HOSTS) * setting.batch_size)
    if needed >= steps_an_epoch:
        raise SystemExit(
            f"error: --steps: {needed} steps in all turns of two nodes, "
            f"but an epoch has {steps_an_epoch}"
        )


def sent() -> int:
    """Return the bytes that the loopback interface has sent since the machine was started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")
