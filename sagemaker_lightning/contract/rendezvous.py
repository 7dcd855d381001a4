"""Tells torch.distributed where the hosts are, and waits for their names.

It turns the job's hosts into the variables of torch.distributed, NCCL, gloo and libfabric. Only
`join_hosts` sets them in this process's environment. Nothing overwrites what the user has set:
launchers let the user's variables win over these.
"""

import itertools
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from sagemaker_lightning.contract.deadlines import LONGEST_PAUSE
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import ON_STDERR, log

# AWS's own containers use this port, so security groups made for them fit.
MAIN_PORT = 7777
GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The kernel's range of ports that it gives to whoever asks for any."""
FIRST_FREE_PORT = 20_000
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
EFA_TOOLS = "/opt/amazon/efa/bin"  # where AWS's EFA installer puts fi_info


def variables(environment: SageMakerEnvironment) -> dict[str, str]:
    """Return the variables that torch.distributed needs.

    The caller lets the variables that the user has set win over these.
    """
    return torch_distributed(environment) | network(environment)


def prepared(environment: SageMakerEnvironment) -> dict[str, str]:
    """Wait until the names of all hosts resolve, and return `variables`.

    Return {} at once if the toolkit's hook started this process, because it has done both. Raises
    UserError if a name does not resolve within `environment.rendezvous_timeout` seconds.
    """
    if environment.watch:
        return {}
    wait_for_names(environment.hosts, environment.rendezvous_timeout)
    return variables(environment)


def join(environment: SageMakerEnvironment, variables: MutableMapping[str, str]) -> None:
    """Let the hosts of a job find each other; do nothing on one host.

    It waits until their names resolve, and sets what `variables` lacks of MASTER_ADDR, MASTER_PORT,
    NODE_RANK and the network's variables. Raises UserError as `prepared`.
    """
    if len(environment.hosts) > 1:
        forget_absent_interface(environment, variables)
        variables.update(prepared(environment) | dict(variables))


def join_hosts(environment: SageMakerEnvironment | None = None) -> None:
    """Let the hosts of a job find each other, where nothing of ours has started the program.

    It waits until their names resolve, and sets the variables of torch.distributed and of the
    network that are not set yet. Lightning's Trainer reads NODE_RANK when it is made: call this
    before. On one host, and under our launchers, it does nothing.

    Args:
        environment: What SageMaker says about the job; None to read its variables.

    Raises:
        UserError: A name does not resolve within `environment.rendezvous_timeout` seconds.
    """
    join(environment or SageMakerEnvironment.read(), os.environ)


def check_joined(environment: SageMakerEnvironment, variables: Mapping[str, str]) -> None:
    """Raise UserError if Lightning does not know where this host is among several."""
    needed = torch_distributed(environment)
    if missing := [name for name in needed if name != "MASTER_PORT" and name not in variables]:
        raise UserError(
            f"Trainer(num_nodes=...): found {len(environment.hosts)} hosts, and no "
            f"{' and no '.join(missing)} on {environment.current_host}, expected both, which the "
            "Trainer reads when it is made; call sagemaker_lightning.join_hosts() before"
        )


def torch_distributed(environment: SageMakerEnvironment) -> dict[str, str]:
    """Return MASTER_ADDR, MASTER_PORT and NODE_RANK.

    Return {} on one host, where the launcher finds a free port itself, and on a host that takes no
    part in the training.
    """
    if len(environment.hosts) == 1 or not environment.takes_part:
        return {}
    return {
        "MASTER_ADDR": environment.hosts[0],
        "MASTER_PORT": str(MAIN_PORT),
        "NODE_RANK": str(environment.hosts.index(environment.current_host)),
    }


def main_port(variables: Mapping[str, str]) -> int:
    """Return the port of the rendezvous: MASTER_PORT, or MAIN_PORT without it.

    The watch (nodes/watchdog.py) uses the port after it. Raises UserError if MASTER_PORT is not a
    number from 1 to 65534.
    """
    port = variables.get("MASTER_PORT", str(MAIN_PORT))
    if not port.isdigit() or not 0 < int(port) < 65535:
        raise UserError(f"MASTER_PORT: found {port!r}, expected a number from 1 to 65534")
    return int(port)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of this machine that no other program is given before it is used.

    The kernel gives those of a range to whoever asks for any port, as gloo does in each rank.

    Args:
        host: An address of this machine.
    """
    end = 0
    with suppress(OSError):  # Linux alone has the file
        end = int(GIVEN_PORTS.read_text().split()[0])
    ports = range(FIRST_FREE_PORT, end)
    for port in random.SystemRandom().sample(ports, min(len(ports), 100)):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    with socket.create_server((host, 0)) as server:
        found: int = server.getsockname()[1]
        return found


def network(
    environment: SageMakerEnvironment, devices: Path = Path("/dev/infiniband")
) -> dict[str, str]:
    """Return the variables of NCCL, gloo and libfabric for the hosts' network.

    Return {} on one host. The interface that SageMaker names counts only if this machine has it.
    EFA is used if the machine has an EFA device and libfabric has the provider, whatever the
    instance type: lists of types are always out of date (aws/sagemaker-training-toolkit issue 240).
    NCCL and libfabric choose everything else themselves.

    Args:
        environment: Describes the job and this host.
        devices: The folder of the EFA devices.
    """
    if len(environment.hosts) == 1:
        return {}
    variables: dict[str, str] = {}
    if environment.network_interface in _interface_names():
        variables |= dict.fromkeys(INTERFACES, environment.network_interface)
    if list(devices.glob("uverbs*")):
        if _has_efa_provider():
            variables["FI_PROVIDER"] = "efa"
        else:
            log.warning(
                "this host has EFA devices, but the image has no libfabric with the efa "
                "provider: NCCL uses TCP; install AWS's EFA installer in the image"
            )
    return variables


def forget_absent_interface(
    environment: SageMakerEnvironment, variables: MutableMapping[str, str]
) -> None:
    """Remove the network interface of NCCL or gloo if this machine lacks it.

    It is removed from `variables` only if it is the one that SageMaker names. SDK 3's local mode
    writes `ethwe`, and its torchrun driver exports it; with it, gloo fails and NCCL finds nothing.
    An interface that the user has set has another name and stays.
    """
    named = environment.network_interface
    if not named or named in _interface_names():
        return
    for variable in INTERFACES:
        if variables.get(variable) == named:
            del variables[variable]
            log.warning(
                f"{variable}={named} is ignored: this machine has no such interface",
                extra=ON_STDERR,
            )


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each next try: from 0.1 up to LONGEST_PAUSE.

    They grow, because a name that does not resolve now may take a while.
    """
    return (min(0.1 * 1.5 ** min(n, 10), LONGEST_PAUSE) for n in itertools.count())


def wait_for_names(hosts: tuple[str, ...], limit: float) -> None:
    """Wait until the names of all hosts resolve.

    Raises UserError, which names the host, if one does not resolve within `limit` seconds.

    AWS's guide says "Host name information might not be immediately available" when a container
    starts, and asks for retries (sagemaker/latest/dg,
    your-algorithms-training-algo-running-container). Each try asks the resolver again.
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
                        f"host {host}: its name did not resolve within {waited:.0f} s "
                        f"({error.strerror}); give it more time by "
                        "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT (seconds), or see why it never "
                        "started"
                    ) from None
                time.sleep(min(pause, limit - waited))


def _interface_names() -> list[str]:
    """Return the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _has_efa_provider() -> bool:
    """Return whether libfabric has the efa provider; its own tool fi_info says so."""
    tool = shutil.which("fi_info") or shutil.which("fi_info", path=EFA_TOOLS)
    if not tool:
        return False
    return subprocess.run([tool, "-p", "efa"], capture_output=True).returncode == 0
