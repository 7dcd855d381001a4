"""Sets how many OpenMP threads a process has, and how long they spin.

A process gets as many threads as it may use CPUs.

This module imports only the standard library at its top: OpenMP and OpenBLAS read their variables
when torch and numpy load them.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from sagemaker_lightning.contract.errors import UserError

COUNT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
"""The variables by which a user says how many threads there are."""
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""The variables by which a user says how threads wait."""
# A job may have this many processes on each CPU, and this many on any machine. More of them only
# wait for each other, at half a GB of memory each.
PROCESSES_PER_CPU = 4
ALWAYS_ALLOWED_PROCESSES = 8

SPIN_COUNT = 1000
"""How often a waiting thread looks for work before it sleeps; libgomp's own default is 300,000.

An idle CPU is slow to wake: without spinning a training alone on 2 CPUs has 0.85 of the images/s.
But where others want the CPU, a spinning thread keeps the one that it waits for from running: with
the default it has a tenth. A short time costs 4 % alone (results/figures.md). The results are the
same in any case.
"""


def usable_cpus(
    cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Return how many CPUs this process can keep busy.

    That is the number of CPUs in its affinity, or the quota of its cgroups if that is less; at
    least 1.

    Args:
        cgroups: Where the cgroup file systems are mounted.
        own: The file that names the cgroups of this process.
    """
    cpus = len(os.sched_getaffinity(0))
    return min([cpus, *(max(1, round(quota)) for quota in _quotas(cgroups, own))])


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the quotas, in CPUs, of this process's cgroups and those above them.

    It reads versions 1 and 2 of cgroups. In a container, /proc/self/cgroup may name a folder of the
    host, which is mounted as the top folder here; folders that do not exist are skipped.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in (
            (cgroups, cgroups / "unified")
            if not controllers
            else (cgroups / controllers, cgroups / "cpu")
        ):
            for depth in range(len(parts) + 1):
                with suppress(OSError, ValueError):
                    folder = top.joinpath(*parts[:depth])
                    if controllers:
                        quota, period = (
                            (folder / f"cpu.cfs_{name}_us").read_text()
                            for name in ("quota", "period")
                        )
                    else:
                        quota, period = (folder / "cpu.max").read_text().split()
                    if int(quota) > 0:  # "max" is not a number, -1 is version 1's
                        yield int(quota) / int(period)


def thread_variables(ranks: int = 1, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each of `ranks` processes that share the CPUs.

    Return {} if the user has set the number of threads, or if OpenMP's own choice is good: one
    thread for each CPU, or for each core.

    Args:
        ranks: Number of processes.
        given: The variables that the user may have set.
    """
    cpus = usable_cpus()
    if any(name in given for name in COUNT_VARIABLES) or (
        ranks == 1 and cpus == len(os.sched_getaffinity(0))
    ):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cpus // ranks))}


def variables_of_user(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in COUNT_VARIABLES that the user has set.

    The toolkit's hook sets OMP_NUM_THREADS for a job's own program, which may call ours. A variable
    with the value that the hook would set is not the user's.
    """
    set_by_hook = thread_variables(given={})
    return {
        name: environment[name]
        for name in COUNT_VARIABLES
        if name in environment and environment[name] != set_by_hook.get(name)
    }


USER_VARIABLES = variables_of_user(os.environ)  # read before `prepare` adds to os.environ


def prepare() -> None:
    """Set the number of threads of a single process, and how long they spin.

    Call it before torch or numpy is imported. What the user has set stays.
    """
    os.environ.update(thread_variables(given=USER_VARIABLES))
    if not any(name in os.environ for name in WAITING_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def check_process_count(processes: int, flag: str = "--trainer.devices") -> None:
    """Raise UserError if this machine has too few CPUs for so many processes.

    Args:
        processes: Number of processes.
        flag: The flag that asked for them, for the message.
    """
    cpus = usable_cpus()
    allowed = max(ALWAYS_ALLOWED_PROCESSES, PROCESSES_PER_CPU * cpus)
    if processes > allowed:
        raise UserError(
            f"{flag}: found {processes}, expected at most {allowed} processes on {cpus} CPUs; "
            f"give {cpus} or fewer, or take a machine with more CPUs"
        )


def divide_cpus(ranks: int, device: str = "cpu") -> None:
    """Divide the CPUs among the ranks of this node.

    Ranks that Lightning starts inherit OMP_NUM_THREADS from this process. Ranks that torchrun
    starts come here with the value that their launcher has set. Raises UserError if ranks that
    compute on CPUs are too many for this machine.

    Args:
        ranks: Number of ranks, this process included.
        device: Type of the device on which they compute, such as "cpu" or "cuda".
    """
    import torch

    if device == "cpu":
        check_process_count(ranks)
    if (
        ranks > 1
        and "LOCAL_RANK" not in os.environ
        and (shares := thread_variables(ranks, USER_VARIABLES))
    ):
        os.environ.update(shares)
        torch.set_num_threads(int(shares["OMP_NUM_THREADS"]))
