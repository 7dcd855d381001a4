"""OpenMP threads of this process: as many as it may use CPUs, and none that spins while others want the CPU.

Only the standard library is imported here: OpenMP and OpenBLAS read their variables when torch and numpy load them.
"""

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from sagemaker_lightning.contract.errors import UserError

COUNT = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_THREAD_LIMIT",
)  # by these a user says how many threads there are
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # and by these how they wait
PROCESSES_PER_CPU, PROCESSES = (
    4,
    8,
)  # allowed of one job: more only wait for each other, at half a GB of memory each

INTERVAL = (
    0.25  # seconds for which it is looked how long this process's threads have to wait for a CPU
)
CROWDED = (
    0.2  # share of that wait, in the time that they want to run, above which others want the CPU
)
HOLD, LONGEST = (
    1.0,
    4.0,
)  # seconds without spinning, until it is looked again: at first, and at last


def usable_cpus(
    cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Return how many CPUs this process can keep busy: its affinity's, or its cgroups' quota where that is less."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cpus, *(max(1, round(quota)) for quota in _quotas(cgroups, own))])


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's cgroups and of all above them, in CPUs; of versions 1 and 2.

    In a container, /proc/self/cgroup may name a folder of the host, which is mounted as the top one: the folders that
    are not there are passed over.
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


def variables(ranks: int = 1, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each of `ranks` processes that share what this one may use.

    Nothing where the user has said it, or where OpenMP chooses well by itself: one for each CPU, or for each core.
    """
    cpus = usable_cpus()
    if any(name in given for name in COUNT) or (
        ranks == 1 and cpus == len(os.sched_getaffinity(0))
    ):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cpus // ranks))}


def users(given: Mapping[str, str]) -> dict[str, str]:
    """Return what the user has said: not what the toolkit's hook has set for a job's own program that calls ours."""
    shares = variables(given={})
    return {
        name: given[name] for name in COUNT if name in given and given[name] != shares.get(name)
    }


USERS = users(os.environ)  # before `prepare` adds to it
_watching = threading.Event()


def prepare() -> None:
    """Set the number of threads of a single process. To be called before torch or numpy is imported."""
    os.environ.update(variables(given=USERS))


def check(processes: int, flag: str = "--trainer.devices") -> None:
    """Raise UserError where so many processes for one job on this machine's CPUs would hardly come to train."""
    cpus = usable_cpus()
    allowed = max(PROCESSES, PROCESSES_PER_CPU * cpus)
    if processes > allowed:
        raise UserError(
            f"{flag}: found {processes}, expected at most {allowed} processes on {cpus} CPUs; give {cpus} or fewer, "
            "or take a machine with more CPUs"
        )


def share(ranks: int, device: str = "cpu") -> None:
    """Divide the CPUs among the `ranks` processes of this node, this one included, which compute on a kind of `device`.

    Ranks that Lightning starts inherit the variable. Those of torchrun are here with what their launcher has set.
    """
    import torch

    if device == "cpu":
        check(ranks)
    if ranks > 1 and "LOCAL_RANK" not in os.environ and (chosen := variables(ranks, USERS)):
        os.environ.update(chosen)
        torch.set_num_threads(int(chosen["OMP_NUM_THREADS"]))
    if device == "cpu" and torch.get_num_threads() > 1:
        spin_only_alone(torch.get_num_threads())


def spin_only_alone(threads: int) -> None:
    """Have OpenMP's waiting threads sleep while others want the CPU, for the rest of this process's life.

    At the end of each parallel region libgomp's threads spin for milliseconds, for the next one: an idle CPU is slow
    to wake, and without spinning a step of ours on 2 CPUs takes half as long again. But where jobs share CPUs, a thread
    spins for one that it keeps from running (benchmarks/side_by_side.py). What is computed is the same in any case.
    """
    chosen = any(name in os.environ for name in WAITING)
    if chosen or _watching.is_set() or not Path("/proc/thread-self/schedstat").exists():
        return
    with suppress(OSError):  # torch has another OpenMP
        libgomp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        _watching.set()
        threading.Thread(
            target=_watch, args=(libgomp, threads), daemon=True, name="spinning"
        ).start()


def _watch(libgomp: ctypes.CDLL, threads: int) -> None:
    """Switch spinning off while others want the CPU, as long as this process lives.

    Whether they do is seen only while it is on: threads that sleep wait for a CPU to wake, too.
    """
    # libgomp spins a thousandth as long while this process has more threads of its than CPUs (GNU libgomp's manual,
    # GOMP_SPINCOUNT): so another thread holds as many, asleep, as are missing.
    missing = max(2, libgomp.omp_get_num_procs() - threads + 2)
    hold = HOLD
    while True:
        ran, waited = _scheduled()
        time.sleep(INTERVAL)
        ran, waited = (
            now - before for now, before in zip(_scheduled(), (ran, waited), strict=True)
        )
        if waited <= CROWDED * (ran + waited):
            hold = max(HOLD, hold - INTERVAL)
            continue
        release = threading.Event()
        threading.Thread(
            target=_hold, args=(libgomp, missing, release), daemon=True, name="spinning"
        ).start()
        time.sleep(hold)
        release.set()  # with the thread, libgomp ends those that it held
        hold = min(2 * hold, LONGEST)


def _hold(libgomp: ctypes.CDLL, threads: int, release: threading.Event) -> None:
    """Have `threads` OpenMP threads, this one included, until it is released."""
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL), by each of them
    libgomp.GOMP_parallel(nothing, None, threads, 0)
    release.wait()


def _scheduled() -> tuple[int, int]:
    """Return the nanoseconds that this process's threads ran, and those that they waited for a CPU."""
    ran = waited = 0
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208  names are enough
        with suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as file:  # noqa: PTH123
            numbers = file.read().split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran, waited
