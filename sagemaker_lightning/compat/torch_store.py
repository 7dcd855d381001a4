"""Lets the ranks of a job meet at once: torch's own client waits between two tries to connect.

Ranks that are forked come nearly at the same time, and some before rank 0 has made the store. torch
(2.15, TCPStore) then tries again after 0.3 to 0.7 s, which is a good part of a restart.
"""

import functools
import importlib
import socket
import time
from contextlib import suppress
from typing import Any

# In torch.distributed, a function has the name of its module.
rendezvous = importlib.import_module("torch.distributed.rendezvous")
POLL_SECONDS = 0.01
LONGEST_SECONDS = 10.0
"""After so many, torch continues as it would have at once."""


def connect_soon() -> None:
    """From now on, wait until rank 0 has made the store, and connect then."""
    create = rendezvous._create_c10d_store

    @functools.wraps(create)
    def create_soon(hostname: str, port: int, rank: int, *args: Any, **options: Any) -> Any:
        if rank:
            wait_for_server(hostname, port)
        return create(hostname, port, rank, *args, **options)

    rendezvous._create_c10d_store = create_soon  # type: ignore[attr-defined]


def wait_for_server(hostname: str, port: int) -> None:
    """Return once a server accepts connections, or after LONGEST_SECONDS.

    Args:
        hostname: Its name or address.
        port: Its port.
    """
    until = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < until:
        with suppress(OSError):  # also a name that is not known yet
            socket.create_connection((hostname, port), LONGEST_SECONDS).close()
            return
        time.sleep(POLL_SECONDS)
