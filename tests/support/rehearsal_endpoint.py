"""Serves the rehearsal's endpoint without an engine.

    python tests/support/rehearsal_endpoint.py FLAGS       in the rehearsal's environment

Only the engine is missing: a job's hosts are threads that print their variables, and continue until
they are ended, unless the variable LEAVE is one of them. 127.0.0.2 takes the place of the address
on Docker's bridge.
"""

import sys
import threading

from sagemaker_rehearsal import __main__, session
from sagemaker_rehearsal.api import sockets


class Host:
    def __init__(self, variables: dict) -> None:
        self.variables = variables
        self.ended = threading.Event()

    def lines(self):
        """Yield its variables, and wait until it is ended."""
        yield from (f"{name}={value}" for name, value in self.variables.items())
        if "LEAVE" not in self.variables:
            self.ended.wait()

    def wait(self) -> int:
        """Return its exit status."""
        return 0

    def signal(self, name: str) -> None:
        self.ended.set()


class Engine:
    """Stands in for an engine and for a job's network."""

    name = "docker"
    interface = "eth0"
    bridge = "127.0.0.2"

    def local(self, name: str) -> str:
        """Return that the image is on this machine."""
        return f"id of {name}"

    def image(self, uri: str) -> str:
        return uri

    def network(self, *_) -> "Engine":
        return self

    def start(self, host, number, image, command, layout, read_only, variables: dict) -> Host:
        return Host(variables)

    def close(self) -> None:
        """Leave nothing behind."""


if __name__ == "__main__":
    session.choose = lambda settings, owner: Engine()
    # Shorter than a person would want, so that no test has to wait.
    sockets.STRANGER_SECONDS = 2.0
    sockets.MAX_CONNECTIONS = 16
    sockets.QUEUE_SECONDS = 0.2
    sys.argv[1:1] = ["serve"]
    __main__.main()
