"""Builds the command line of torchrun, and replaces this process by torchrun."""

import argparse
import os
import sys
from pathlib import Path

from sagemaker_lightning.contract import deadlines, rendezvous
from sagemaker_lightning.contract.environment import (
    SageMakerEnvironment,
    failure_file,
    host_and_rank,
)
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.process import start_notice, threads

VARIABLES = {
    # Seconds that torchrun leaves its ranks after SIGTERM.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{deadlines.TORCHRUN_KILLS:.0f}",
    # Make torchrun open a new store each time that it starts the ranks. In the store that torch
    # 2.15 shares between these starts, ranks that are started again find the addresses of dead
    # ones, and gloo is refused or waits for ever (dynamic_rendezvous.py, next_rendezvous).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def command(
    environment: SageMakerEnvironment,
    args: list[str],
    gpus: int,
    program: Path,
    max_restarts: int = 0,
) -> list[str]:
    """Return the command line by which torchrun starts a program on this node.

    On several nodes, the first host keeps the store of the rendezvous. `is_host` tells torchrun
    which host that is, because a container's own name is not that of its host. The nodes get their
    ranks in the order of their names, which is SageMaker's.

    Args:
        environment: Describes the job.
        args: The program's arguments.
        gpus: Number of GPUs of this node.
        program: The program's file.
        max_restarts: How often torchrun may start all ranks again.

    Raises UserError if `args` ask for too many processes, or for what is not a number.
    """
    variables = rendezvous.torch_distributed(environment) | os.environ
    if len(environment.hosts) > 1:
        here = environment.current_host
        port = rendezvous.main_port(variables)
        flags = [
            f"--nnodes={len(environment.hosts)}",
            "--rdzv-backend=c10d",
            f"--local-addr={here}",
        ]
        flags += [f"--rdzv-endpoint={environment.hosts[0]}:{port}"]
        flags += [f"--rdzv-conf=is_host={int(here == environment.hosts[0])}"]
    else:
        flags = ["--standalone"]
    ranks = processes(args, gpus)
    if not gpus:
        threads.check_process_count(ranks)
    flags += [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    torchrun = str(Path(__file__).with_name("torchrun.py"))
    return [sys.executable, torchrun, *flags, str(program), *args]


def processes(args: list[str], gpus: int) -> int:
    """Return the number of processes on this node.

    It is that of --trainer.devices in `args`. Without the flag, it is that of the GPUs, or 1 if
    there is no GPU. Raises UserError if the flag is wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trainer.devices", dest="devices", default="auto")
    devices = parser.parse_known_args(args)[0].devices.strip()
    if devices in ("auto", "-1", "", "[]"):
        return gpus or 1
    if devices.isdigit() and int(devices):
        return int(devices)
    # As in Lightning, "[2]" and "2," are the one GPU of that number.
    names = [name for name in devices.strip("[] ").split(",") if name.strip()]
    if devices.isdigit() or not names or not all(name.strip().isdigit() for name in names):
        raise UserError(
            f"--trainer.devices: found {devices!r}, expected -1, auto, a number or a list of "
            "numbers"
        )
    return len(names)


def _restarts(args: list[str] | None) -> tuple[int, list[str]]:
    """Return the number that --max_restarts allows, and `args` without that flag.

    If `args` is None, those of sys.argv are taken. Raises UserError if the flag has no number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max_restarts", "--max-restarts", default="0")
    known, other_args = parser.parse_known_args(args)
    if not known.max_restarts.isdigit():
        raise UserError(
            f"--max_restarts: found {known.max_restarts!r}, expected a number, 0 or more"
        )
    return int(known.max_restarts), other_args


def main(program: Path, args: list[str] | None = None) -> None:
    """Become torchrun, which starts `program` with `args` (sys.argv's if None).

    Exits with status 1, and one line, if the settings are wrong or a host does not appear.
    """
    import torch  # here, because the toolkit's process imports this module and needs no torch

    with reported(failure_file(), host_and_rank()):
        environment = SageMakerEnvironment.read()
        gpus = environment.num_gpus or torch.cuda.device_count()
        restarts, program_args = _restarts(args)
        command_line = command(environment, program_args, gpus, program, restarts)
        if len(environment.hosts) > 1:
            start_notice.set_activity("waiting for the other hosts")
        # torchrun itself would give each rank one thread.
        thread_variables = threads.thread_variables(processes(program_args, gpus))
        variables = rendezvous.prepared(environment) | VARIABLES | thread_variables | os.environ
        # With restarts, a rank's death does not end the job; torchrun's end does. So the ranks do
        # not connect to the watch.
        if restarts:
            variables.pop("SAGEMAKER_LIGHTNING_WATCH", None)
    start_notice.set_activity("torchrun, which starts the ranks")
    os.execve(command_line[0], command_line, variables)
