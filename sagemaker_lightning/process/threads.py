"""Sets how many OpenMP threads a process has, and whether they spin.

A process gets as many threads as it may use CPUs. They do not spin while others want the CPU.

This module imports only the standard library at its top: OpenMP and OpenBLAS read their variables
when torch and numpy load them.
"""

import ctypes
import os
import threading
import time
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

MEASURING_SECONDS = 0.25  # in which we measure how long this process's threads wait for a CPU
# Of the time that the threads want to run, the share for which they wait for a CPU. Above this
# share, others want the CPU.
CROWDED_SHARE = 0.2
# Seconds without spinning before we measure again: the shortest and the longest time.
SHORTEST_HOLD_SECONDS = 1.0
LONGEST_HOLD_SECONDS = 4.0


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
                    if int(quota) > 0:  # "max" is no number, -1 is version 1's
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
    """Return those variables of COUNT that the user has set.

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
_is_watched = threading.Event()  # set once the thread of `spin_only_alone` runs


def prepare() -> None:
    """Set the number of threads of a single process.

    Call it before torch or numpy is imported.
    """
    os.environ.update(thread_variables(given=USER_VARIABLES))


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
    if device == "cpu" and torch.get_num_threads() > 1:
        spin_only_alone(torch.get_num_threads())


def spin_only_alone(threads: int) -> None:
    """Let OpenMP's waiting threads sleep while others want the CPU.

    This holds until the process ends.

    At the end of each parallel region, libgomp's threads spin for milliseconds, to be ready for the
    next one: an idle CPU is slow to wake, and without spinning a step of ours on 2 CPUs takes half
    as long again. But where jobs share CPUs, a spinning thread may wait for a thread that it keeps
    from running (benchmarks/side_by_side.py). The results are the same in any case.

    Nothing changes if the user has set a variable of WAITING, or if torch uses another OpenMP.

    Args:
        threads: Number of OpenMP threads of this process.
    """
    is_set_by_user = any(name in os.environ for name in WAITING_VARIABLES)
    if is_set_by_user or _is_watched.is_set() or not Path("/proc/thread-self/schedstat").exists():
        return
    with suppress(OSError):  # torch has another OpenMP
        libgomp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        _is_watched.set()
        threading.Thread(
            target=_control_spinning, args=(libgomp, threads), daemon=True, name="spinning"
        ).start()


def _control_spinning(libgomp: ctypes.CDLL, threads: int) -> None:
    """Switch spinning off while others want the CPU, as long as this process lives.

    We can see that others want the CPU only while spinning is on: threads that sleep also wait for
    a CPU, each time that they wake.
    """
    # libgomp spins a thousandth as long while this process has more of libgomp's threads than CPUs
    # (GNU libgomp's manual, GOMP_SPINCOUNT). So another thread holds as many sleeping threads as
    # are missing.
    missing = max(2, libgomp.omp_get_num_procs() - threads + 2)
    hold = SHORTEST_HOLD_SECONDS
    while True:
        ran_before, waited_before = _scheduled()
        time.sleep(MEASURING_SECONDS)
        ran_after, waited_after = _scheduled()
        ran = ran_after - ran_before
        waited = waited_after - waited_before
        if waited <= CROWDED_SHARE * (ran + waited):
            hold = max(SHORTEST_HOLD_SECONDS, hold - MEASURING_SECONDS)
            continue
        release = threading.Event()
        threading.Thread(
            target=_hold_openmp_threads,
            args=(libgomp, missing, release),
            daemon=True,
            name="spinning",
        ).start()
        time.sleep(hold)
        release.set()  # the thread ends, and libgomp ends the threads that it held
        hold = min(2 * hold, LONGEST_HOLD_SECONDS)


def _hold_openmp_threads(libgomp: ctypes.CDLL, threads: int, release: threading.Event) -> None:
    """Keep `threads` OpenMP threads, this one included, alive until `release` is set."""
    # Each of the threads calls free(NULL), which does nothing.
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
    libgomp.GOMP_parallel(nothing, None, threads, 0)
    release.wait()


def _scheduled() -> tuple[int, int]:
    """Return the nanoseconds that this process's threads ran and waited for a CPU."""
    ran = 0
    waited = 0
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208  names are enough
        with suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as file:  # noqa: PTH123
            numbers = file.read().split()
            ran += int(numbers[0])
            waited += int(numbers[1])
    return ran, waited
