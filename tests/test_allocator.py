"""process/allocator.py: what glibc is asked for. tests/test_overhead.py has what comes of it."""

import ctypes
from types import SimpleNamespace

import pytest

from sagemaker_lightning.process import allocator


def test_glibc_is_asked_to_keep_blocks_of_up_to_a_gibibyte(monkeypatch):
    """Its thresholds are of type int: two gibibytes would be negative."""
    asked = []
    glibc = SimpleNamespace(mallopt=lambda *option: asked.append(option))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: glibc)
    allocator.keep_freed_memory()
    # -3 is M_MMAP_THRESHOLD of malloc.h, -1 is M_TRIM_THRESHOLD.
    assert asked == [(-3, 2**30), (-1, 2**30)]


def test_glibc_is_asked_to_return_all_that_it_has_kept(monkeypatch):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=asked.append))
    allocator.return_freed_memory()
    assert asked == [0]  # bytes that it may keep


@pytest.mark.parametrize("ask", [allocator.keep_freed_memory, allocator.return_freed_memory])
def test_another_c_library_is_left_alone(monkeypatch, ask):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    ask()
