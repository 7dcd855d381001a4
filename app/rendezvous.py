"""From the hosts of a job to torch.distributed's variables. Pure: it reads and writes no environment."""

import socket
import sys
from collections.abc import MutableMapping

from app.environment import Environment

MAIN_PORT = 7777  # the port AWS's own containers use, so that security groups made for them fit


def torch_distributed(environment: Environment) -> dict[str, str]:
    """Return MASTER_ADDR, MASTER_PORT and NODE_RANK; none on one host, where the launcher finds a free port itself."""
    if len(environment.hosts) == 1:
        return {}
    return {
        "MASTER_ADDR": environment.hosts[0],
        "MASTER_PORT": str(MAIN_PORT),
        "NODE_RANK": str(environment.hosts.index(environment.current_host)),
    }


def forget_absent_interface(environment: Environment, variables: MutableMapping[str, str]) -> None:
    """Remove NCCL's or gloo's network interface where SageMaker named one that this machine has not.

    SDK 3's local mode writes `ethwe` and its torchrun driver exports it; gloo fails with it, NCCL finds nothing. What
    the user has set differs from SageMaker's name and stays.
    """
    named = environment.network_interface
    if not named or named in (name for _, name in socket.if_nameindex()):
        return
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if variables.get(variable) == named:
            del variables[variable]
            print(f"warning: {variable}={named} is ignored: this machine has no such interface", file=sys.stderr)
