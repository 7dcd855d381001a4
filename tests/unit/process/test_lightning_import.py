"""process/lightning_import.py: a start imports nothing that few jobs need."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

IMPORTED = """
import gc, sys
from sagemaker_lightning.process.lightning_import import import_lightning
import_lightning()
assert gc.isenabled() and "torchvision" in sys.modules
print(gc.get_freeze_count())
"""


@pytest.mark.slow
def test_no_garbage_is_looked_for_among_what_lightning_has_made():
    completed = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True
    )
    assert int(completed.stdout) > 100_000 and not completed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("train.py", marks=pytest.mark.soak), "train_multi_node.py"]
)
def test_a_program_imports_nothing_that_few_jobs_need(name, tmp_path):
    command = [sys.executable, "-X", "importtime", str(ROOT / "app" / name), "--help"]
    completed = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", completed.stderr, re.MULTILINE))
    assert completed.returncode == 0 and "pytorch_lightning" in imported
    assert not imported & {
        "s3fs",
        "boto3",
        "botocore",
        "sklearn",
        "matplotlib",
    }
