"""What a process leaves out that most jobs would pay for in vain."""

import subprocess
import sys

import torch
from conftest import ROOT
from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric

from app import lean

FAULTS = """
import resource, sys, torch
from app import memory
if sys.argv[1:]:
    memory.keep_freed()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(10_000_000)
before = faults()
for _ in range(40):
    torch.ones(10_000_000)
print(faults() - before)
"""


def test_memory_that_was_freed_is_not_cleared_again():
    given_back, kept = (
        int(subprocess.check_output([sys.executable, "-c", FAULTS, *more], cwd=ROOT, text=True))
        for more in ([], ["keep"])
    )
    assert given_back > 40 * 5000 and kept < given_back / 3


def test_a_logged_value_is_moved_to_another_device_only():
    lean.install()
    metric = _ResultMetric(_Metadata("training_step", "loss", on_step=True, on_epoch=False), is_tensor=True)
    value = metric.value
    assert metric.to(torch.device("cpu")) is metric and metric.value is value
    assert metric.to(torch.device("meta")).value.device.type == "meta"
