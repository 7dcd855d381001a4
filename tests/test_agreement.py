"""All ranks learn of a signal to one rank at the next step, however long steps take."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
import warm
from containers import ROOT
from torch import distributed

from sagemaker_lightning.resume.agreement import Agreement


def calls_until_heard(counts: int) -> list[int]:
    """Return after how many calls each of two signals was heard.

    The second one is heard as a due checkpoint.
    """
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=rank == 0))
    for _ in range(counts):
        agreement.agree(0, False)
    # A numpy generator's state has this form.
    gathered = agreement.gather({"key": torch.tensor([rank, 2**32 - 1]).to(torch.uint32)})
    assert [answer["key"].tolist() for answer in gathered] == [[0, 2**32 - 1], [1, 2**32 - 1]]
    calls = []
    for signal, due in ((0, rank == 0), (15 if rank == 1 else 0, False)):
        calls.append(0)
        while not (agreement.signal_number or agreement.checkpoint_due):
            agreement.agree(signal, due)
            calls[-1] += 1
        agreement.checkpoint_saved()
    agreement.receive()
    distributed.destroy_process_group()
    return calls


@pytest.mark.slow
def test_it_is_heard_at_the_next_call(tmp_path: Path):
    ended = ranks.run(calls_until_heard, 300, folder=tmp_path)
    assert [ended_rank.value for ended_rank in ended] == [[2, 2], [2, 2]], [
        ended_rank.error for ended_rank in ended
    ]


RANK_THAT_WAITS = """
import os, signal, sys, time
from pathlib import Path
from sagemaker_lightning.contract import shutdown
shutdown.BATCH_WAIT_SECONDS = 0.2
with shutdown.Stop(Path("nowhere"), lambda line: print(line, flush=True)) as heard:
    heard.begin()
    heard.batch_seconds = float(sys.argv[1])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3)
    print("the batch is done", flush=True)
"""


RANK_WHOSE_OUTPUT_IS_CLOSED = """
import os, signal, sys, time
from pathlib import Path
from sagemaker_lightning.contract import shutdown
sys.stdout.close()
with shutdown.Stop(Path("nowhere"), lambda line: print(line, flush=True)):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(%s)
"""


def test_a_signal_ends_a_process_whose_output_is_closed():
    run = subprocess.run(
        [sys.executable, "-c", RANK_WHOSE_OUTPUT_IS_CLOSED % ranks.HANG_SECONDS],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 143


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "ended"), [("0.01", 143), ("30", 0)])
def test_a_batch_that_takes_long_is_no_rank_that_hangs(tmp_path: Path, seconds, ended):
    run = warm.run(
        ["python", "-c", RANK_THAT_WAITS, seconds], tmp_path, os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == ended, run.stdout
    line = (
        "interrupted, resume from step 0: SIGTERM; no batch ended within 0 s, "
        "so there is no newer checkpoint"
    )
    assert ("the batch is done" in run.stdout) is (ended == 0) and (line in run.stdout) is (
        ended == 143
    )
