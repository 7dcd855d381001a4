"""From the hosts of a job to torch.distributed's variables. Pure: it reads and writes no environment."""

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
