"""process/allocator.py: what glibc is asked for."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

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


FAULTS = """
import resource, sys, torch
from sagemaker_lightning.process import allocator
if sys.argv[1:]:
    allocator.keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(10_000_000)
before = faults()
for _ in range(40):
    torch.ones(10_000_000)
print(faults() - before)
"""


@pytest.mark.thorough  # of glibc's own: what it is asked is above
@pytest.mark.slow
def test_memory_that_was_freed_is_not_cleared_again():
    faults_when_given_back, faults_when_kept = (
        int(
            subprocess.check_output([sys.executable, "-c", FAULTS, *arguments], cwd=ROOT, text=True)
        )
        for arguments in ([], ["keep"])
    )
    assert faults_when_given_back > 40 * 5000 and faults_when_kept < faults_when_given_back / 3


GIVEN_BACK = """
import torch
import re
from pathlib import Path
from sagemaker_lightning.process import allocator
allocator.keep_freed_memory()
def resident():  # without the files' pages, which the kernel takes back when it likes
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = resident()
some = [torch.ones(10_000_000) for _ in range(4)]
del some[:3]  # in the middle of the heap
kept = resident()
allocator.return_freed_memory()
print(kept - before, resident() - before)
"""


@pytest.mark.thorough  # of glibc's own: what it is asked is above
@pytest.mark.slow
def test_memory_that_was_needed_once_is_given_back():
    bytes_kept, bytes_left = map(
        int,
        subprocess.check_output([sys.executable, "-c", GIVEN_BACK], cwd=ROOT, text=True).split(),
    )
    assert bytes_kept > 150e6 and 40e6 < bytes_left < 60e6
