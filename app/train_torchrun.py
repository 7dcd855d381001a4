"""Starts app/train.py on this node by torchrun, which starts one process for each device.

    docker run -e SAGEMAKER_PROGRAM=app/train_torchrun.py IMAGE train
    python app/train_torchrun.py FLAGS          --trainer.devices=N for N processes on a CPU

torchrun's own documentation: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

import argparse
import os
import sys
from pathlib import Path

from app import rendezvous
from app.environment import Environment, failure_file, place
from app.failures import reported


def command(environment: Environment, args: list[str], gpus: int, program: Path) -> list[str]:
    """Return the command line by which torchrun starts `program` with `args` on this node, which has `gpus` GPUs."""
    variables = rendezvous.torch_distributed(environment)
    if variables:
        place = [f"--nnodes={len(environment.hosts)}", f"--node-rank={variables['NODE_RANK']}"]
        place += [f"--master-addr={variables['MASTER_ADDR']}", f"--master-port={variables['MASTER_PORT']}"]
    else:
        place = ["--standalone"]
    count = f"--nproc-per-node={processes(args, gpus)}"
    return [sys.executable, "-m", "torch.distributed.run", *place, count, str(program), *args]


def processes(args: list[str], gpus: int) -> int:
    """Return the number of processes: what --trainer.devices says, else one for each GPU, else one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trainer.devices", dest="devices", default="auto")
    devices = parser.parse_known_args(args)[0].devices.strip("[] ")
    if devices in ("auto", "-1", ""):
        return gpus or 1
    names = [name for name in devices.split(",") if name.strip()]
    if not all(name.strip().isdigit() for name in names) or devices == "0":
        raise ValueError(f"--trainer.devices: found {devices!r}, allowed are -1, auto, a number or a list of numbers")
    return int(names[0]) if len(names) == 1 else len(names)


def main(args: list[str] | None = None) -> None:
    """Become torchrun."""
    import torch  # here, as the toolkit imports this module and needs no torch

    with reported(failure_file(), place()):
        environment = Environment.read()
        gpus = environment.num_gpus or torch.cuda.device_count()
        program = Path(__file__).with_name("train.py")
        line = command(environment, sys.argv[1:] if args is None else args, gpus, program)
    os.execv(line[0], line)


if __name__ == "__main__":
    main()
