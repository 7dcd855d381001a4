"""state/graph/shared_memory.py: what processes share has one content, whoever has the object."""

import mmap
import multiprocessing
from multiprocessing import sharedctypes

import numpy as np
import pytest
import torch
from graph_records import changed, mine

from sagemaker_lightning.state.graph import state as state_module
from sagemaker_lightning.state.graph.shared_memory import SharedMemory


def numbers(value) -> list[int]:
    """Return what an object holds."""
    return list(memory(value))


def memory(value) -> np.ndarray:
    """Return the memory of an object."""
    held = value.numpy() if isinstance(value, torch.Tensor) else value
    return np.frombuffer(getattr(held, "get_obj", lambda: held)(), np.int32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: multiprocessing.Value("i", 0),
        lambda: multiprocessing.Array("i", [0, 0]),
        lambda: sharedctypes.RawValue("i", 0),
        lambda: sharedctypes.RawArray("i", 2),
        lambda: torch.zeros(2, dtype=torch.int32).share_memory_().numpy(),
        lambda: np.frombuffer(mmap.mmap(-1, 8), np.int32)[::1],
        lambda: torch.zeros(2, dtype=torch.int32).share_memory_(),
    ],
)
def test_what_processes_share_comes_back_alone(make):
    shared = make()
    owner, state = mine(shared=shared, own=np.zeros(2, np.int32))
    memory(shared)[:] = 3
    memory(owner.own)[:] = 3
    record = state.encode()
    state.begin().reset()
    assert not any(numbers(shared)) and not any(numbers(owner.own))
    state.return_shared(record)
    assert set(numbers(shared)) == {3} and not any(numbers(owner.own))


def test_an_event_of_processes_comes_back_alone():
    owner, state = mine(shared=multiprocessing.Event(), steps=0)
    owner.shared.set()
    owner.steps = 3
    record = state.encode()
    owner.shared.clear()
    owner.steps = 0
    state.return_shared(record)
    assert owner.shared.is_set() and owner.steps == 0


def test_a_change_of_what_processes_share_is_nobodys():
    owner, state = mine(shared=multiprocessing.Value("i", 0), own=torch.zeros(2))
    owner.shared.value = 1
    assert changed(state) == set()
    owner.own += 1
    assert changed(state) == {"own"}


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2),
        torch.zeros(2),
        torch.zeros(2).numpy(),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.nested.nested_tensor([torch.zeros(2)]),
        memoryview(bytearray(2)),
        memoryview(bytearray(4))[::2],
        [0],
        b"0",
    ],
)
def test_a_processs_own_content_is_not_shared(value):
    assert not SharedMemory().has(value)


def test_a_running_process_never_sees_what_was_there_at_the_start(monkeypatch):
    shared = multiprocessing.Value("i", 0)
    owner, state = mine(shared=shared, own=np.zeros(2, np.int32))
    memory(shared)[:] = 3
    record = state.encode()
    memory(owner.own)[:] = 3
    seen = []
    restore = state_module.restore
    monkeypatch.setattr(
        state_module, "restore", lambda *args: seen.append(numbers(shared)) or restore(*args)
    )
    state.return_to(record)
    assert seen == [[3]] and numbers(shared) == [3] and not any(numbers(owner.own))
