"""Deadlines nest: what must end first has the shorter deadline."""

import ast
from itertools import pairwise

import pytest
from containers import ROOT

from sagemaker_lightning.contract import deadlines, shutdown
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.rendezvous import pauses


def test_whoever_waits_for_another_waits_longer():
    """Each deadline is some seconds longer than the one that it waits for.

    In these seconds the process notices the other's end, and does its own part.
    """
    order = [
        deadlines.BATCH_ENDS,
        deadlines.CHECKPOINT_IS_WRITTEN,
        deadlines.TORCHRUN_KILLS,
        deadlines.HOOK_KILLS,
        deadlines.SAGEMAKER_KILLS,
    ]
    assert all(later - earlier >= 5 for earlier, later in pairwise(order))
    # It is waited for after a batch has ended.
    waited = deadlines.BATCH_ENDS + deadlines.CHECKPOINT_IS_COPIED
    assert waited + 5 <= deadlines.CHECKPOINT_IS_WRITTEN
    # After the program's end, the hook ends the processes that it left, reads its stderr, and
    # writes the failure file.
    after_the_program = deadlines.REST_IS_KILLED + deadlines.STDERR_IS_READ
    assert deadlines.HOOK_KILLS + after_the_program < deadlines.SAGEMAKER_KILLS
    # A batch of unknown length gets no more time than a checkpoint that is being written.
    assert (
        shutdown.BATCH_WAIT_SECONDS
        < shutdown.WRITING_WAIT_SECONDS
        == deadlines.CHECKPOINT_IS_WRITTEN
    )


@pytest.mark.parametrize("seconds_in_all", [6.0, deadlines.LOST_HOST_ENDS_JOB, 600.0])
def test_the_parts_of_what_a_lost_host_takes(seconds_in_all: float):
    silence = deadlines.silence(seconds_in_all)
    # Several messages of a host may be late before it counts as lost.
    assert 5 * deadlines.status_interval(silence) <= silence
    # Every host notices the loss, tells all, and ends within the time that the user has set.
    assert silence + deadlines.ends_after_loss(seconds_in_all) < seconds_in_all
    # A node that waits for a reason waits until the node that knows the reason has noticed it; that
    # node waits for less.
    assert deadlines.better_reason(silence) < deadlines.any_reason(silence)
    assert silence < deadlines.any_reason(silence)


def test_by_default_a_lost_rank_ends_all_in_time_too():
    """The time is that of the doubt about a death, the launcher's end, and the kill."""
    seconds_in_all = deadlines.LOST_HOST_ENDS_JOB
    doubt = deadlines.better_reason(deadlines.silence(seconds_in_all))
    assert (
        doubt + deadlines.ENDS_BY_ITSELF + deadlines.ends_after_loss(seconds_in_all)
        < seconds_in_all
    )
    # A job whose hosts never met says so before anybody would take a host for lost.
    assert seconds_in_all > deadlines.HOST_APPEARS
    assert (
        max(pause for pause, _ in zip(pauses(), range(30), strict=False)) == deadlines.LONGEST_PAUSE
    )
    assert deadlines.HOST_APPEARS > 2 * deadlines.LONGEST_PAUSE


def test_the_seconds_of_the_table():
    """Users, SageMaker's own limits and docs/interruptions.md rely on them."""
    table = {name: value for name, value in vars(deadlines).items() if name.isupper()}
    assert table == {
        "BATCH_ENDS": 25.0,
        "CHECKPOINT_IS_WRITTEN": 90.0,
        "CHECKPOINT_IS_COPIED": 60.0,
        "TORCHRUN_KILLS": 100.0,
        "STOP_IS_LATE": 5.0,
        "HOOK_KILLS": 110.0,
        "SAGEMAKER_KILLS": 120.0,
        "REST_IS_KILLED": 5.0,
        "STDERR_IS_READ": 2.0,
        "HOST_APPEARS": 50.0,
        "LOST_HOST_ENDS_JOB": 60.0,
        "HANG_ENDS_PROGRAM": 600.0,
        "ENDS_BY_ITSELF": 5.0,
        "RESTART_KILLS": 1.0,
        "LONGEST_PAUSE": 5.0,
    }
    assert (deadlines.silence(60.0), deadlines.ends_after_loss(60.0)) == (30.0, 10.0)
    assert [deadlines.status_interval(silence) for silence in (30.0, 5.0)] == [2.0, 1.0]
    assert [deadlines.better_reason(silence) for silence in (30.0, 6.0)] == [15.0, 6.0]
    assert deadlines.any_reason(30.0) == 35.0


@pytest.mark.slow
def test_the_table_is_what_is_used():
    from sagemaker_lightning.launch import torchrun_command

    assert (
        float(torchrun_command.VARIABLES["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        == deadlines.TORCHRUN_KILLS
    )
    assert SageMakerEnvironment.rendezvous_timeout == deadlines.HOST_APPEARS
    assert SageMakerEnvironment.peer_timeout == deadlines.LOST_HOST_ENDS_JOB
    used = set()
    for package in ("sagemaker_lightning", "sagemaker_rehearsal"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "deadlines.py":
                tree = ast.walk(ast.parse(path.read_text()))
                used |= {getattr(node, "id", getattr(node, "attr", "")) for node in tree}
    names = {name for name in vars(deadlines) if not name.startswith("_")}
    assert names == names & used, f"not used: {names - used}"
