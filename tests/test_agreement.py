"""A signal to one rank is heard by all at the next step, however long the steps before it took."""

import os
from pathlib import Path
from types import SimpleNamespace

import ranks
from torch import distributed

from app.agreement import Agreement


def heard(before: int) -> list[int]:
    """Return after how many calls each of two signals was heard, the second of them as a due checkpoint."""
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=rank == 0))
    for _ in range(before):
        agreement.agree(0, False)
    calls = []
    for signal, due in ((0, rank == 0), (15 if rank == 1 else 0, False)):
        calls.append(0)
        while not (agreement.asked or agreement.due):
            agreement.agree(signal, due)
            calls[-1] += 1
        agreement.due = False
    agreement.settle()
    distributed.destroy_process_group()
    return calls


def test_it_is_heard_at_the_next_call(tmp_path: Path):
    ended = ranks.run(heard, 300, folder=tmp_path)
    assert [one.value for one in ended] == [[2, 2], [2, 2]], [one.error for one in ended]
