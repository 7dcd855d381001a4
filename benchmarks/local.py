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


def speedup(turns: Round, name: str) -> float:
    """Return images/s of two nodes / of one."""
    return turns[name, *TWO].rate / turns[name, *ONE].rate


def communication(turns: Round, name: str) -> float:
    """Return the share of a step of two nodes that would vanish without the exchange.

    It is below 0 if noise outweighs it.
    """
    return 1 - turns[name, *TWO].rate / turns[name, *ALONE].rate


def waiting(turns: Round, name: str) -> float:
    """Return the share of a step of two nodes in which a node only waits.

    It waits for the other node's gradients.
    """
    return turns[name, *TWO].waited / turns[name, *TWO].seconds


QUANTITIES: dict[str, tuple[str, Callable[[Round], float]]] = {
    "ours": ("images/s: our training on two nodes / on one", lambda turns: speedup(turns, "ours")),
    "plain": (
        "images/s: torchrun's DDP in a bare loop on two nodes / on one",
        lambda turns: speedup(turns, "plain"),
    ),
    "efficiency": (
        "two nodes / one, ours / the same of plain DDP",
        lambda turns: speedup(turns, "ours") / speedup(turns, "plain"),
    ),
    "two nodes": (
        "images/s on two nodes: our training / plain DDP",
        lambda turns: turns["ours", *TWO].rate / turns["plain", *TWO].rate,
    ),
    "cores": (
        "images/s: ours on two nodes that exchange nothing / on one",
        lambda turns: turns["ours", *ALONE].rate / turns["ours", *ONE].rate,
    ),
    "communication": (
        "seconds: what the exchange adds / our step",
        lambda turns: communication(turns, "ours"),
    ),
    "plain communication": (
        "seconds: the same / plain DDP's step",
        lambda turns: communication(turns, "plain"),
    ),
    "waiting": (
        "seconds: for the other node's gradients / our step",
        lambda turns: waiting(turns, "ours"),
    ),
    "plain waiting": (
        "seconds: the same / plain DDP's step",
        lambda turns: waiting(turns, "plain"),
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
        rates = {turn: median(turns[turn].rate for turns in rounds[-1]) for turn in nodes.TURNS}
        rates_text = ", ".join(
            f"{name} {count} {order} {rate:.1f}" for (name, count, order), rate in rates.items()
        )
        print(f"images/s: {rates_text}", flush=True)
    ratios = {
        name: [median(map(value, measurement)) for measurement in rounds]
        for name, (_, value) in QUANTITIES.items()
    }
    report.publish(
        [report.Comparison(name, QUANTITIES[name][0], values) for name, values in ratios.items()]
    )
    print(f"\n{step([turns for measurement in rounds for turns in measurement], batch_size)}")


def step(rounds: list[Round], batch_size: int) -> str:
    """Return the seconds and the bytes of a step of our training, and `predict`'s flags.

    With these flags, `predict` continues from the measurement.
    """
    turns_on_one, turns_on_two = (
        [round_turns["ours", *nodes_and_order] for round_turns in rounds]
        for nodes_and_order in (ONE, TWO)
    )
    seconds, seconds_on_two = (
        median(turn.seconds for turn in turns) for turns in (turns_on_one, turns_on_two)
    )
    megabytes = median(turn.sent for turn in turns_on_two) / 1e6
    overlap = median(turn.overlapped / turn.seconds for turn in turns_on_two)
    return (
        f"our step of {batch_size} images a rank: {seconds:.4f} s on one node, "
        f"{seconds_on_two:.4f} s on two; sent by a node in a step: {megabytes:.2f} MB\n"
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
