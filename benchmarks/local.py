"""The gain of two nodes of one core each: `python -m benchmarks.scaling local`.

benchmarks.scaling says what the ratios mean.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import nodes, report
from benchmarks.nodes import Round
from benchmarks.ranks import EXCHANGE, SILENT
from benchmarks.training import BATCH_SIZE

ONE = (1, EXCHANGE)
TWO = (2, EXCHANGE)
ALONE = (2, SILENT)


def speedup(found: Round, name: str) -> float:
    """Return images/s of two nodes / of one."""
    return found[name, *TWO].rate / found[name, *ONE].rate


def communication(found: Round, name: str) -> float:
    """Return the share of a step of two nodes that would vanish without the exchange.

    It is below 0 if noise outweighs it.
    """
    return 1 - found[name, *TWO].rate / found[name, *ALONE].rate


def waiting(found: Round, name: str) -> float:
    """Return the share of a step of two nodes in which a node only waits.

    It waits for the other node's gradients.
    """
    return found[name, *TWO].waited / found[name, *TWO].seconds


QUANTITIES: dict[str, tuple[str, Callable[[Round], float]]] = {
    "ours": ("images/s: our training on two nodes / on one", lambda found: speedup(found, "ours")),
    "plain": (
        "images/s: torchrun's DDP in a bare loop on two nodes / on one",
        lambda found: speedup(found, "plain"),
    ),
    "efficiency": (
        "two nodes / one, ours / the same of plain DDP",
        lambda found: speedup(found, "ours") / speedup(found, "plain"),
    ),
    "two nodes": (
        "images/s on two nodes: our training / plain DDP",
        lambda found: found["ours", *TWO].rate / found["plain", *TWO].rate,
    ),
    "cores": (
        "images/s: ours on two nodes that exchange nothing / on one",
        lambda found: found["ours", *ALONE].rate / found["ours", *ONE].rate,
    ),
    "communication": (
        "seconds: what the exchange adds / our step",
        lambda found: communication(found, "ours"),
    ),
    "plain communication": (
        "seconds: the same / plain DDP's step",
        lambda found: communication(found, "plain"),
    ),
    "waiting": (
        "seconds: for the other node's gradients / our step",
        lambda found: waiting(found, "ours"),
    ),
    "plain waiting": (
        "seconds: the same / plain DDP's step",
        lambda found: waiting(found, "plain"),
    ),
}


def run(n: int, steps: int, batch_size: int, flags: list[str]) -> None:
    """Measure on this machine and print ratios, each the median of a measurement's rounds."""
    setting = nodes.Setting(steps, batch_size, flags)
    nodes.check(setting)
    torch.set_num_threads(1)  # as the nodes have it, for the report
    rounds = []
    for _ in range(n):
        rounds.append(nodes.measure(setting))
        rates = {turn: median(found[turn].rate for found in rounds[-1]) for turn in nodes.TURNS}
        found = ", ".join(
            f"{name} {count} {order} {rate:.1f}" for (name, count, order), rate in rates.items()
        )
        print(f"images/s: {found}", flush=True)
    ratios = {
        name: [median(map(value, found)) for found in rounds]
        for name, (_, value) in QUANTITIES.items()
    }
    report.publish(
        [report.Comparison(name, QUANTITIES[name][0], found) for name, found in ratios.items()]
    )
    print(f"\n{step([found for measured in rounds for found in measured], batch_size)}")


def step(rounds: list[Round], batch_size: int) -> str:
    """Return the seconds and the bytes of a step of our training, and `predict`'s flags.

    With these flags, `predict` continues from the measurement.
    """
    one, two = ([found["ours", *where] for found in rounds] for where in (ONE, TWO))
    seconds, both = (median(turn.seconds for turn in turns) for turns in (one, two))
    megabytes = median(turn.sent for turn in two) / 1e6
    overlap = median(turn.overlapped / turn.seconds for turn in two)
    return (
        f"our step of {batch_size} images a rank: {seconds:.4f} s on one node, "
        f"{both:.4f} s on two; sent by a node in a step: {megabytes:.2f} MB\n"
        f"to predict: --step={seconds:.4f} --megabytes={megabytes:.2f} --overlap={overlap:.3f} "
        f"--batch_size={batch_size}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    for flag, default, what in (
        ("--n", 5, "measurements, each of new processes"),
        ("--steps", 6, "timed steps of a turn"),
        ("--batch_size", BATCH_SIZE, "images of a step, per rank"),
    ):
        parser.add_argument(
            flag, type=report.positive, default=default, help=f"{what} (default: {default})"
        )
