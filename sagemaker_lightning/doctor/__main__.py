"""Prints what this container has for training, and what is wrong.

    python -m sagemaker_lightning.doctor

One finding is a line: `ok`, `note` (training works, perhaps slowly) or `WRONG`, the subject, and
what was found. The exit status is 1 if anything is wrong, else 0. It needs only the standard
library; if torch is there, it is asked in a process of its own whether it can use the GPUs.
SAGEMAKER_LIGHTNING_ROOT names a folder to look at in place of /, as the tests do.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sagemaker_lightning.contract.command_line import Parser
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.doctor import checks, gpu_driver
from sagemaker_lightning.doctor.checks import Finding, Level

# In a process of its own: an import that crashes is a finding, too.
ASK_TORCH = """
import torch
torch.zeros(1, device="cuda")
names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print("torch", torch.__version__, "computes on", ", ".join(names))
"""
TORCH_CHECK_SECONDS = 120


def ask_torch(machine: checks.Machine) -> Iterator[Finding]:
    """Let torch compute on a GPU, where there are a driver and a torch for CUDA."""
    if not gpu_driver.Host.read(machine.root).driver or not gpu_driver.installed_cuda():
        return
    line = [sys.executable, "-W", "ignore", "-c", ASK_TORCH]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=TORCH_CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"torch did not compute on the GPU within {TORCH_CHECK_SECONDS} s"
        yield Finding("torch", text, Level.WRONG)
        return
    if done.returncode == 0:
        yield Finding("torch", done.stdout.strip())
    else:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        reason = next((text for text in reversed(lines) if "Error" in text), lines[-1])
        yield Finding("torch", f"cannot compute on the GPU ({reason[:300]})", Level.WRONG)


def main() -> int:
    """Print the findings; return 1 if one of them is wrong, else 0."""
    root = Path(os.environ.get("SAGEMAKER_LIGHTNING_ROOT", "/"))
    wrong = 0
    try:
        interface = SageMakerEnvironment.read().network_interface
    except UserError as error:
        interface = None
        print(Finding("job", str(error), Level.WRONG))
        wrong += 1
    machine = checks.Machine(root, interface=interface)
    for check in (checks.findings, ask_torch):
        for finding in check(machine):
            print(finding, flush=True)
            wrong += finding.level is Level.WRONG
    print(f"{wrong} wrong" if wrong else "nothing is wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    Parser(
        prog="python -m sagemaker_lightning.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    sys.exit(main())
