"""Cuts and slows the network of a process that has a network namespace, and loses its packets.

It needs root, and iptables or tc of iproute2. The network of this machine itself is left alone.
"""

from collections.abc import Callable

from sagemaker_rehearsal.faults.errors import CannotInject, check_namespace, run

# Share of all packets, in both directions.
LOST_SHARE = 0.1
# Rate at which the host sends; the queue holds what comes within so many milliseconds.
SLOW_RATE = "1mbit"
QUEUE_MILLISECONDS = 400
BURST_BYTES = 32 * 1024


def cut_network(pid: int, interface: str = "eth0") -> Callable[[], None]:
    """Drop all packets of a process's network, silently; return the function that ends it.

    Args:
        pid: A process in the network namespace.
        interface: The device that leads out of it.
    """
    return _drop(pid, interface, [])


def lose_packets(
    pid: int, interface: str = "eth0", share: float = LOST_SHARE
) -> Callable[[], None]:
    """Drop a share of the packets at random, in both directions; return what ends it.

    Args:
        pid: A process in the network namespace.
        interface: The device that leads out of it.
        share: Share of all packets, 0 to 1.
    """
    at_random = ["-m", "statistic", "--mode", "random", "--probability", f"{share:.6f}"]
    return _drop(pid, interface, at_random)


def slow_network(pid: int, interface: str = "eth0", rate: str = SLOW_RATE) -> Callable[[], None]:
    """Let a process's network send no more than `rate`; return the function that ends it.

    Args:
        pid: A process in the network namespace.
        interface: The device that leads out of it.
        rate: As tc(8) writes it, e.g. 1mbit.
    """
    inside = _inside(pid)
    device = ["dev", interface, "root"]
    limits = ["rate", rate, "burst", f"{BURST_BYTES}", "latency", f"{QUEUE_MILLISECONDS}ms"]
    run([*inside, "tc", "qdisc", "add", *device, "tbf", *limits])
    return lambda: _undo([[*inside, "tc", "qdisc", "del", *device]])


def _drop(pid: int, interface: str, which: list[str]) -> Callable[[], None]:
    """Drop packets that a match of iptables finds; return the function that ends it."""
    inside = _inside(pid)
    # -w: another fault may hold the lock of iptables.
    rules = [
        [chain, direction, interface, *which, "-j", "DROP"]
        for chain, direction in (("INPUT", "-i"), ("OUTPUT", "-o"))
    ]
    table = [*inside, "iptables", "-w"]
    added: list[list[str]] = []
    try:
        for rule in rules:
            run([*table, "-I", *rule])
            added.append([*table, "-D", *rule])
    except CannotInject:
        _undo(added)
        raise
    return lambda: _undo(added)


def _inside(pid: int) -> list[str]:
    """Return the words before a command that run it in a process's network namespace."""
    check_namespace(pid, "net", "network")
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def _undo(commands: list[list[str]]) -> None:
    """Run commands; what has ended with its host needs no undoing."""
    for command in commands:
        try:
            run(command)
        except CannotInject:
            continue
