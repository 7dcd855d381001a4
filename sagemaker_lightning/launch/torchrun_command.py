"""The command line of torchrun on a node, and becoming it."""

import argparse
import os
import sys
from pathlib import Path

from sagemaker_lightning.contract import rendezvous
from sagemaker_lightning.contract.environment import Environment, failure_file, place
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.process import start_notice, threads

VARIABLES = {
    # Seconds that torchrun leaves its ranks after SIGTERM: SageMaker kills after 120, and torchrun has to end, too.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100",
    # A store of its own for each start: in the one that torch 2.15 shares between them, ranks that are started again
    # find the addresses of dead ones, and gloo is refused or waits for ever (dynamic_rendezvous.py, next_rendezvous).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def command(
    environment: Environment, args: list[str], gpus: int, program: Path, max_restarts: int = 0
) -> list[str]:
    """Return the command line by which torchrun starts `program` with `args` on this node, which has `gpus` GPUs.

    On several nodes the first host keeps the store of the rendezvous (told by `is_host`: a container's own name is not
    that of its host), and the nodes get their ranks in the order of their names, which is SageMaker's.
    """
    variables = rendezvous.torch_distributed(environment) | os.environ
    if len(environment.hosts) > 1:
        here = environment.current_host
        place = [
            f"--nnodes={len(environment.hosts)}",
            "--rdzv-backend=c10d",
            f"--local-addr={here}",
        ]
        place += [f"--rdzv-endpoint={environment.hosts[0]}:{rendezvous.main_port(variables)}"]
        place += [f"--rdzv-conf=is_host={int(here == environment.hosts[0])}"]
    else:
        place = ["--standalone"]
    ranks = processes(args, gpus)
    if not gpus:
        threads.check(ranks)
    place += [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    return [
        sys.executable,
        str(Path(__file__).with_name("torchrun.py")),
        *place,
        str(program),
        *args,
    ]


def processes(args: list[str], gpus: int) -> int:
    """Return the number of processes: what --trainer.devices says, else one for each GPU, else one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trainer.devices", dest="devices", default="auto")
    devices = parser.parse_known_args(args)[0].devices.strip("[] ")
    if devices in ("auto", "-1", ""):
        return gpus or 1
    names = [name for name in devices.split(",") if name.strip()]
    if not all(name.strip().isdigit() for name in names) or devices == "0":
        raise UserError(
            f"--trainer.devices: found {devices!r}, allowed are -1, auto, a number or a list of numbers"
        )
    return int(names[0]) if len(names) == 1 else len(names)


def _restarts(args: list[str]) -> tuple[int, list[str]]:
    """Return how often all ranks may be started again, and `args` without the flag that says so."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max_restarts", "--max-restarts", default="0")
    given, rest = parser.parse_known_args(args)
    if not given.max_restarts.isdigit():
        raise UserError(
            f"--max_restarts: found {given.max_restarts!r}, allowed is a number, 0 or more"
        )
    return int(given.max_restarts), rest


def main(program: Path, args: list[str] | None = None) -> None:
    """Become torchrun, which starts `program` with `args` (sys.argv's if None)."""
    import torch  # here, as the toolkit imports this module and needs no torch

    with reported(failure_file(), place()):
        environment = Environment.read()
        gpus = environment.num_gpus or torch.cuda.device_count()
        restarts, rest = _restarts(sys.argv[1:] if args is None else args)
        line = command(environment, rest, gpus, program, restarts)
        if len(environment.hosts) > 1:
            start_notice.doing("waiting for the other hosts")
        shares = threads.variables(
            processes(rest, gpus)
        )  # torchrun's own choice is one thread each
        variables = rendezvous.prepared(environment) | VARIABLES | shares | os.environ
        if restarts:  # a rank that dies is then no reason to end: its torchrun is
            variables.pop("SAGEMAKER_LIGHTNING_WATCH", None)
    start_notice.doing("torchrun, which starts the ranks")
    os.execve(line[0], line, variables)
