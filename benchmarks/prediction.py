"""The gain of more nodes, computed from a model of a step and the instance types.

A step of N nodes takes as long as one on a single node, and in addition the part of the exchange
that does not fit beside the computing:

    step(N) = step(1) + max(0, exchange(N) - overlap * step(1))
    exchange(N) = 2 (k - 1) / k * bytes / (bandwidth * efficiency)
                  + 2 (N - 1) * latency * buckets     (N > 1)

Each of the k ranks in the ring sends 2 (k - 1) / k of the bytes; ranks that only send to each other
cannot do with less (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009). A ring over the devices of all nodes enters and leaves each node once, so a
node's network carries what one rank sends. With one device a node, k = N.
"""

import argparse
import math
from dataclasses import MISSING, dataclass, field, fields

from benchmarks import report

NODES = (1, 2, 4, 8, 16, 32, 64)
MIB = 2**20


@dataclass(frozen=True)
class Instance:
    """An instance type."""

    devices: int
    """Ranks: GPUs, or one for all cores."""
    gbps: float
    """Network bandwidth in each direction, 10^9 bit/s; the baseline where AWS says "up to"."""


# The bandwidths are BaselineBandwidthInGbps of EC2's DescribeInstanceTypes (karpenter-provider-aws
# lists them all in its zz_generated.bandwidth.go); p3.16xlarge: AWS's page of the P3 instances.
INSTANCES = {
    "ml.c5.xlarge": Instance(devices=1, gbps=1.25),
    "ml.g4dn.xlarge": Instance(devices=1, gbps=5),
    "ml.g4dn.12xlarge": Instance(devices=4, gbps=50),
    "ml.g5.12xlarge": Instance(devices=4, gbps=40),
    "ml.g5.48xlarge": Instance(devices=8, gbps=100),
    "ml.g6.12xlarge": Instance(devices=4, gbps=40),
    "ml.p3.16xlarge": Instance(devices=8, gbps=25),
    "ml.p4d.24xlarge": Instance(devices=8, gbps=400),
    "ml.p5.48xlarge": Instance(devices=8, gbps=3200),
}


def _flag(what: str, default: float = MISSING) -> float:
    """Return a field that is also a flag: `what` is its help."""
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True)
class Job:
    """The bytes that are exchanged, and the seconds of a step.

    The defaults are ResNet-18's on CIFAR-10, and guesses.
    """

    step: float = _flag(
        "seconds of a step on one node of the type, the exchange among its own devices included"
    )
    megabytes: float = _flag("gradients of a step, 10^6 bytes", 44.73)  # 11,181,642 of float32
    overlap: float = _flag(
        "share of a step on one node beside which gradients can be exchanged", 0.0
    )
    batch_size: int = _flag("images of a step, per rank", 32)
    images: int = _flag("images of an epoch", 50_000)
    efficiency: float = _flag("share of the bandwidth that arrives as gradients", 0.8)
    latency: float = _flag("seconds from node to node", 50e-6)

    @property
    def buckets(self) -> int:
        """Number of all-reduces of a step: DDP's first bucket has 1 MiB, the others 25 MiB."""
        return 1 + max(0, math.ceil((self.megabytes * 1e6 / MIB - 1) / 25))


def exchange(job: Job, instance: Instance, nodes: int) -> float:
    """Return the seconds in which `nodes` nodes exchange the gradients of a step."""
    if nodes == 1:
        return 0.0
    ranks = nodes * instance.devices
    bits = 2 * (ranks - 1) / ranks * job.megabytes * 8e6
    return (
        bits / (instance.gbps * 1e9 * job.efficiency) + 2 * (nodes - 1) * job.latency * job.buckets
    )


def epoch(job: Job, instance: Instance, nodes: int) -> float:
    """Return the seconds of an epoch on `nodes` nodes."""
    step = job.step + max(0.0, exchange(job, instance, nodes) - job.overlap * job.step)
    return job.images / (job.batch_size * instance.devices * nodes) * step


def assumptions(job: Job) -> str:
    """Return the assumptions of the tables."""
    return (
        "Predicted, not measured. Assumed:\n"
        f"- weak scaling: {job.batch_size} images a rank and step on any number of nodes, "
        "so that N nodes need N times fewer steps\n"
        f"  for the {job.images} images of an epoch; the table has the time of an epoch\n"
        f"- a step takes {job.step:g} s on one node, of whatever type: "
        "to be measured on that type, with all its devices\n"
        f"- {job.megabytes:g} MB of gradients a step, in {job.buckets} all-reduces, "
        "by a ring over all ranks\n"
        f"- a node sends, and receives at once, at {job.efficiency:.0%} of its type's bandwidth; "
        f"a message takes {job.latency:g} s\n"
        "- a type's bandwidth is what AWS states for EC2, "
        'where that is "up to" something the baseline; p4d and p5 need EFA for\n'
        "  theirs, of which the image has no library: --gbps=100, one network card, "
        "is what they have without\n"
        f"- {job.overlap:.0%} of a step are beside the exchange; "
        "what does not fit there is waited for\n"
        "- nodes are equally fast, "
        "and data, validation, checkpoints and starting cost nothing more"
    )


def run(instance_type: list[str], gbps: float | None, **job: float) -> None:
    """Print the assumptions, and a table for each instance type.

    `gbps` replaces the types' own bandwidths.
    """
    chosen = Job(**job)
    print(assumptions(chosen))
    for name in instance_type:
        instance = Instance(INSTANCES[name].devices, gbps or INSTANCES[name].gbps)
        print(
            f"\n{name}: {instance.devices} rank{'s' if instance.devices > 1 else ''} a node, "
            f"{instance.gbps:g} Gbps\n"
        )
        print(report.improvements({nodes: epoch(chosen, instance, nodes) for nodes in NODES}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fields of `Job`, the instance types and their bandwidth."""
    types = {"nargs": "+", "choices": INSTANCES, "default": list(INSTANCES), "metavar": "TYPE"}
    parser.add_argument(
        "--instance_type", **types, help=f"of {', '.join(INSTANCES)} (default: all)"
    )
    parser.add_argument("--gbps", type=float, help="bandwidth instead of the type's own")
    for flag in fields(Job):
        if flag.default is MISSING:
            parser.add_argument(
                f"--{flag.name}", type=flag.type, required=True, help=flag.metadata["help"]
            )
        else:
            what = f"{flag.metadata['help']} (default: %(default)g)"
            parser.add_argument(f"--{flag.name}", type=flag.type, default=flag.default, help=what)
