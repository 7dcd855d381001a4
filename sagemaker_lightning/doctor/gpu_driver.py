"""Decides whether NVIDIA's forward-compatibility libraries are needed, and can help.

    python sagemaker_lightning/doctor/gpu_driver.py FOLDER

prints FOLDER, the place of these libraries, if the host's driver is older than the installed torch
needs and they can take the place of its part of the driver; else it prints nothing. entrypoint.sh
runs it as a program, and puts what it prints on the library path. A line on stderr says what it
decided, unless the driver is new enough or there is none.

It needs only the standard library, and does not import torch.

Sources: NVIDIA, "CUDA Compatibility", Forward Compatibility (data centre GPUs alone); "CUDA
Toolkit, Driver, and Architecture Matrix" (CUDA 13 has no Volta and older); conda-forge's feedstock
of cuda-compat (the place and the names of the libraries).
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# By major version of CUDA: the oldest driver branch that runs it, and the oldest that runs it with
# the forward-compatibility libraries.
OLDEST_DRIVER = {12: 525, 13: 580}
OLDEST_WITH_COMPATIBILITY = {12: 450, 13: 535}
# Volta and older: CUDA 13 has no code for them.
DROPPED_GPUS = re.compile(r"\b(K\d+|M\d+|P4|P40|P100|V100\w*|TITAN V)\b")
DATA_CENTRE_GPUS = re.compile(
    r"\b(T4G?|A2|A10[GM]?|A16|A30|A40|A100|A800|L4|L20|L40S?|H20|H100|H200|H800|B100|B200|B300"
    r"|G[HB]200|GB300)\b"
)


@dataclass(frozen=True)
class Host:
    """What this container sees of the host's GPUs and driver."""

    driver: str
    """The driver's version, e.g. "535.183.01"; "" if there is no driver."""
    models: tuple[str, ...]
    """The name of each GPU, e.g. ("Tesla T4",), in the order of their PCI addresses."""

    @classmethod
    def read(cls, root: Path) -> "Host":
        """Read them below `root`, which is / except in tests."""
        folder = root / "proc/driver/nvidia"
        files = sorted(folder.glob("gpus/*/information"))
        return cls(
            driver=_search(folder / "version", r"Kernel Module.*?\s(\d+\.[\d.]+)\s"),
            models=tuple(_search(file, r"(?m)^Model:\s*(.*?)\s*$") for file in files),
        )


@dataclass(frozen=True)
class Decision:
    """What is done about the driver."""

    line: str
    """One line for the log; "" if there is nothing to say."""
    use: bool = False
    """Whether the forward-compatibility libraries are put on the library path."""


def installed_cuda() -> str:
    """Return the version of CUDA that torch is built for, e.g. "13.2".

    It is "" if there is no torch, or if torch is built for the CPU. torch is not imported.
    """
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    return _search(Path(spec.origin).with_name("version.py"), r"(?m)^cuda\b.*= *'([\d.]+)'")


def library_version(folder: Path) -> str:
    """Return the driver version of the libraries in `folder`; "" if they are not there."""
    names = (path.name.removeprefix("libcuda.so.") for path in folder.glob("libcuda.so.*.*"))
    return max(names, key=_numbers, default="")


def decide(host: Host, cuda: str, library: str) -> Decision:
    """Return what to do about a host's driver.

    Args:
        host: The host's driver and GPUs.
        cuda: The version of CUDA that torch is built for, or "".
        library: The driver version of the forward-compatibility libraries, or "".
    """
    major = _numbers(cuda)[0] if cuda else 0
    needed = OLDEST_DRIVER.get(major)
    if not host.driver or not needed:
        return Decision("")
    dropped = [model for model in host.models if DROPPED_GPUS.search(model)]
    if major >= 13 and dropped:
        return Decision(
            f"GPU {dropped[0]}: CUDA {cuda}, which torch is built for, has no code for Volta and "
            "older; use an instance with a newer GPU (ml.g4dn, ml.g5, ml.g6, ml.p4d or later)"
        )
    if _numbers(host.driver)[0] >= needed:
        return Decision("")
    old = f"GPU driver {host.driver} is older than CUDA {cuda} needs (R{needed})"
    oldest = OLDEST_WITH_COMPATIBILITY[major]
    others = [model for model in host.models if not DATA_CENTRE_GPUS.search(model)]
    if _numbers(host.driver)[0] < oldest:
        advice = f"no library helps below R{oldest}; use another instance type, or a newer driver"
    elif others or not host.models:
        model = others[0] if others else "an unknown GPU"
        advice = f"no library helps for {model}, which is not a data centre's; update it"
    elif _numbers(library) <= _numbers(host.driver):
        advice = (
            "the compatibility libraries, which would help, are not in this environment; install "
            f"conda-forge's cuda-compat={cuda}"
        )
    else:
        return Decision(f"{old}; NVIDIA's compatibility libraries {library} are used", use=True)
    return Decision(f"{old}; {advice}")


def in_use(folder: Path, environment: Mapping[str, str]) -> bool:
    """Return whether `folder` is on the library path of `environment`."""
    return str(folder) in environment.get("LD_LIBRARY_PATH", "").split(":")


def _numbers(version: str) -> list[int]:
    """Return the numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _search(file: Path, pattern: str) -> str:
    """Return what the first group of `pattern` finds in a file; "" if nothing, or no file."""
    try:
        match = re.search(pattern, file.read_text(errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""


def main() -> None:
    """Print the folder of the libraries if they are to be used; say why on stderr."""
    folder = Path(sys.argv[1])
    root = Path(os.environ.get("SAGEMAKER_LIGHTNING_ROOT", "/"))
    decision = decide(Host.read(root), installed_cuda(), library_version(folder))
    if decision.line:
        print(decision.line, file=sys.stderr)
    if decision.use:
        print(folder)


if __name__ == "__main__":
    main()
