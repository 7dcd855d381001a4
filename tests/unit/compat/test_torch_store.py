"""compat/torch_store.py: a rank that comes before rank 0 connects once the store is there."""

import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from sagemaker_lightning.compat import torch_store
from sagemaker_lightning.contract.rendezvous import free_port


@pytest.fixture
def made(monkeypatch) -> list:
    """What stores were made, each with whether there was a server then."""
    made = []

    def create(hostname, port, rank, world_size, timeout=None) -> str:
        with socket.socket() as client:
            made.append((rank, world_size, timeout, client.connect_ex((hostname, port)) == 0))
        return "store"

    monkeypatch.setattr(torch_store, "rendezvous", SimpleNamespace(_create_c10d_store=create))
    return made


def test_torch_has_what_is_replaced():
    assert callable(torch_store.rendezvous._create_c10d_store)


def test_another_rank_waits_for_the_store_of_rank_0(made):
    port = free_port()
    torch_store.connect_soon()

    def rank_0() -> None:
        time.sleep(0.3)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(0.05)
            while not made:
                with suppress(TimeoutError):
                    server.accept()[0].close()

    thread = threading.Thread(target=rank_0)
    thread.start()
    create = torch_store.rendezvous._create_c10d_store
    assert create("127.0.0.1", port, 1, 2, timeout=7) == "store"
    thread.join()
    assert made == [(1, 2, 7, True)]


def test_rank_0_does_not_wait(made):
    torch_store.connect_soon()
    torch_store.rendezvous._create_c10d_store("127.0.0.1", free_port(), 0, 2)
    assert made == [(0, 2, None, False)]


def test_a_store_that_does_not_come_is_torchs_to_wait_for(made, monkeypatch):
    monkeypatch.setattr(torch_store, "LONGEST_SECONDS", 0.05)
    torch_store.connect_soon()
    torch_store.rendezvous._create_c10d_store("127.0.0.1", free_port(), 1, 2)
    assert made == [(1, 2, None, False)]
