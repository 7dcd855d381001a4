"""From the hosts of a job to torch.distributed's variables, and one bounded wait for the hosts' names.

It writes no environment, and what the user has set is never overwritten: launchers put these variables below theirs.
"""

import itertools
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from sagemaker_lightning.contract.environment import Environment
from sagemaker_lightning.contract.errors import UserError

MAIN_PORT = 7777  # the port AWS's own containers use, so that security groups made for them fit
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
EFA_TOOLS = "/opt/amazon/efa/bin"  # where AWS's EFA installer puts fi_info


def variables(environment: Environment) -> dict[str, str]:
    """Return all that torch.distributed needs to know, as variables for those that the user has not set."""
    return torch_distributed(environment) | network(environment)


def prepared(environment: Environment) -> dict[str, str]:
    """Return `variables` as soon as all hosts have their names; none where the toolkit's hook has seen to it."""
    if environment.watch:
        return {}
    wait_for_names(environment.hosts, environment.rendezvous_timeout)
    return variables(environment)


def torch_distributed(environment: Environment) -> dict[str, str]:
    """Return MASTER_ADDR, MASTER_PORT and NODE_RANK; none on one host, where the launcher finds a free port itself."""
    if len(environment.hosts) == 1 or not environment.takes_part:
        return {}
    return {
        "MASTER_ADDR": environment.hosts[0],
        "MASTER_PORT": str(MAIN_PORT),
        "NODE_RANK": str(environment.hosts.index(environment.current_host)),
    }


def main_port(variables: Mapping[str, str]) -> int:
    """Return the port of the rendezvous, MAIN_PORT unless MASTER_PORT says otherwise; the watch's is the next one."""
    port = variables.get("MASTER_PORT", str(MAIN_PORT))
    if not port.isdigit() or not 0 < int(port) < 65535:
        raise UserError(f"MASTER_PORT: found {port!r}, allowed is a number from 1 to 65534")
    return int(port)


def network(environment: Environment, devices: Path = Path("/dev/infiniband")) -> dict[str, str]:
    """Return what NCCL, gloo and libfabric need to know of the network between the hosts; none on one host.

    The interface that SageMaker names counts only if this machine has it. EFA is used where there is a device of it and
    libfabric has its provider, whatever the instance type: lists of types are always behind
    (aws/sagemaker-training-toolkit issue 240). Everything else is left to NCCL and libfabric.
    """
    if len(environment.hosts) == 1:
        return {}
    variables = {}
    if environment.network_interface in _interfaces():
        variables |= dict.fromkeys(INTERFACES, environment.network_interface)
    if list(devices.glob("uverbs*")):
        if _has_efa_provider():
            variables["FI_PROVIDER"] = "efa"
        else:
            print(
                "warning: this host has EFA devices, but the image has no libfabric with the efa provider: NCCL uses "
                "TCP; install AWS's EFA installer in the image",
                flush=True,
            )
    return variables


def forget_absent_interface(environment: Environment, variables: MutableMapping[str, str]) -> None:
    """Remove NCCL's or gloo's network interface where SageMaker named one that this machine has not.

    SDK 3's local mode writes `ethwe` and its torchrun driver exports it; gloo fails with it, NCCL finds nothing. What
    the user has set differs from SageMaker's name and stays.
    """
    named = environment.network_interface
    if not named or named in _interfaces():
        return
    for variable in INTERFACES:
        if variables.get(variable) == named:
            del variables[variable]
            print(
                f"warning: {variable}={named} is ignored: this machine has no such interface",
                file=sys.stderr,
            )


def pauses() -> Iterator[float]:
    """Yield the seconds between one try and the next: growing, as a name that is not there now may take a while."""
    return (min(0.1 * 1.5 ** min(n, 10), 5.0) for n in itertools.count())


def wait_for_names(hosts: tuple[str, ...], limit: float) -> None:
    """Return when the names of all hosts resolve; UserError names the one that did not within `limit` seconds.

    "Host name information might not be immediately available" when a container starts, so AWS's guide, which asks for
    retries (sagemaker/latest/dg, your-algorithms-training-algo-running-container). Each try asks the resolver anew.
    """
    started = time.monotonic()
    for host in hosts:
        for pause in pauses():
            try:
                socket.getaddrinfo(host, None)
                break
            except OSError as error:
                waited = time.monotonic() - started
                if waited >= limit:
                    raise UserError(
                        f"host {host}: its name did not resolve within {waited:.0f} s ({error.strerror}); give it "
                        "more time by SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT (seconds), or see why it never started"
                    ) from None
                time.sleep(min(pause, limit - waited))


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _has_efa_provider() -> bool:
    """Return whether libfabric, by its own tool, finds EFA."""
    tool = shutil.which("fi_info") or shutil.which("fi_info", path=EFA_TOOLS)
    return bool(tool) and subprocess.run([tool, "-p", "efa"], capture_output=True).returncode == 0
