"""What more nodes bring: measured here with one core a node, predicted for AWS, and measured on AWS.

    python -m benchmarks.scaling local [--n 5] [--steps 6] [--batch_size 32] [-- FLAGS OF app/train.py]
    python -m benchmarks.scaling predict --step SECONDS [--megabytes 44.7] [--overlap 0.3] ...
    python -m benchmarks.scaling sagemaker --instances 1 2 4 8 -- FLAGS OF scripts/launch.py

All of it is weak scaling: the batch of a rank stays, so that N nodes train on N times as many images in a step. An
epoch of the same images then has N times fewer steps, and is N times faster if the exchange of gradients is free. That
is what the original's article did, whose table (instances, time, improvement) is printed: 1.8, 3.7 and 7.3 times
faster on 2, 4 and 8 instances.

`local` measures in turns, each round with one of each: our training (app/train_multi_node.py) and torchvision's
ResNet-18 in a bare loop in DDP by torchrun, each on one node and on two. A node is a core of this machine with one
thread; the nodes talk by gloo over the loopback interface. What its ratios mean:

    ours, plain     images/s of two nodes / of one; of 2.0, the rest is communication and what the cores share
    efficiency      the first of these / the second: above 1, we lose less than plain DDP does
    two nodes       images/s of both nodes together, ours / plain
    cores           images/s of two nodes that exchange no gradients / of one node: memory and caches are shared, so
                    that not even this is 2.0
    communication   share of a step that is not there if gradients are not exchanged (DDP's no_sync): waiting, and the
                    work of sending and adding, for which a node here has no second core
    waiting         share of a step from the last gradient computed to the last one exchanged, by DDP's own timers:
                    in which the node has nothing else to do

`predict` says what it assumes above its tables. `sagemaker` runs one job after another by scripts/launch.py.
"""

import argparse
import sys
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import jobs, nodes, prediction, report
from benchmarks.nodes import Round
from benchmarks.ranks import EXCHANGE, SILENT
from benchmarks.training import BATCH_SIZE

PAIRS = 5  # default of --n: processes of each training
ONE, TWO, ALONE = (1, EXCHANGE), (2, EXCHANGE), (2, SILENT)


def speedup(found: Round, name: str) -> float:
    """Return images/s of two nodes / of one."""
    return found[name, *TWO].rate / found[name, *ONE].rate


def communication(found: Round, name: str) -> float:
    """Return the share of a step of two nodes that is not there without the exchange; below 0 if noise outweighs it."""
    return 1 - found[name, *TWO].rate / found[name, *ALONE].rate


def waiting(found: Round, name: str) -> float:
    """Return the share of a step of two nodes with nothing to do but to wait for the other one's gradients."""
    return found[name, *TWO].waited / found[name, *TWO].seconds


QUANTITIES: dict[str, tuple[str, Callable[[Round], float]]] = {
    "ours": ("images/s: our training on two nodes / on one", lambda found: speedup(found, "ours")),
    "plain": ("images/s: torchrun's DDP in a bare loop on two nodes / on one", lambda found: speedup(found, "plain")),
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
    "communication": ("seconds: what the exchange adds / our step", lambda found: communication(found, "ours")),
    "plain communication": ("seconds: the same / plain DDP's step", lambda found: communication(found, "plain")),
    "waiting": ("seconds: for the other node's gradients / our step", lambda found: waiting(found, "ours")),
    "plain waiting": ("seconds: the same / plain DDP's step", lambda found: waiting(found, "plain")),
}


def local(n: int, steps: int, batch_size: int, flags: list[str]) -> None:
    """Measure on this machine and print ratios, each the median of a measurement's rounds."""
    setting = nodes.Setting(steps, batch_size, flags)
    nodes.check(setting)
    torch.set_num_threads(1)  # as the nodes have it, for the report
    rounds = []
    for _ in range(n):
        rounds.append(nodes.measure(setting))
        rates = {turn: median(found[turn].rate for found in rounds[-1]) for turn in nodes.TURNS}
        print(
            *(f"{name} {count} {order}: {rate:.1f}" for (name, count, order), rate in rates.items()),
            sep=", ",
            flush=True,
        )
    report.publish(
        [
            report.Comparison(name, what, [median(map(value, found)) for found in rounds])
            for name, (what, value) in QUANTITIES.items()
        ]
    )
    flat = [found["ours", *TWO] for measured in rounds for found in measured]
    one = median(found["ours", *ONE].seconds for measured in rounds for found in measured)
    both, sent = (median(getattr(turn, name) for turn in flat) for name in ("seconds", "sent"))
    overlap = median(turn.overlapped / turn.seconds for turn in flat)
    print(
        f"\nbatch: {batch_size} images a rank; step: {one:.4f} s on one node, {both:.4f} s on two; "
        f"sent by a node in a step: {sent / 1e6:.2f} MB\n"
        f"to predict: --step={one:.4f} --megabytes={sent / 1e6:.2f} --overlap={overlap:.3f} --batch_size={batch_size}"
    )


def main() -> None:
    """Run what the flags ask for; what comes after -- is another program's."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    here = commands.add_parser("local", help="measure with two cores of this machine as nodes")
    here.add_argument("--n", type=report.positive, default=PAIRS, help="measurements (default: %(default)s)")
    here.add_argument("--steps", type=report.positive, default=6, help="timed steps of a turn (default: %(default)s)")
    here.add_argument("--batch_size", type=report.positive, default=BATCH_SIZE, help="of a rank (default: %(default)s)")
    prediction.add_arguments(commands.add_parser("predict", help="predict for instance types of AWS"))
    jobs.add_arguments(commands.add_parser("sagemaker", help="measure on AWS"))
    args = vars(parser.parse_args(words[:at]))
    command, flags = args.pop("command"), words[at + 1 :]
    if command == "local":
        local(**args, flags=flags)
    elif command == "sagemaker":
        jobs.run(**args, flags=flags)
    else:
        prediction.run(**args)


if __name__ == "__main__":
    main()
