"""What the end of a job's program comes to, as a table."""

import pytest

from sagemaker_lightning.launch.job_end import Known, Outcome, outcome

REASON = {"reason": True}
OF_A_RANK = REASON | {"reason_is_local": True}
TO_STOP = REASON | {"reason_is_request": True}
UNFINISHED = {"is_unfinished": True}
NO_MODEL = {"lacks_model": True}
CASES = {
    "it ended well": ({}, Outcome.SUCCESS),
    "it failed": ({"failed": True}, Outcome.FAILED),
    "it was asked to stop": ({"failed": True, "asked": True}, Outcome.STOPPED),
    "it was asked to stop, and ended well first": ({"asked": True}, Outcome.SUCCESS),
    "it ended within its training": (UNFINISHED | NO_MODEL, Outcome.UNFINISHED),
    "it ended within its training, because it was asked to stop": (
        UNFINISHED | {"asked": True},
        Outcome.STOPPED,
    ),
    "it ended within its training, and another host failed": (
        UNFINISHED | REASON,
        Outcome.FAILED_ELSEWHERE,
    ),
    "it wrote no model": (NO_MODEL, Outcome.NO_MODEL),
    "it wrote no model, because it was asked to stop": (
        NO_MODEL | {"asked": True},
        Outcome.STOPPED,
    ),
    "it wrote no model, while a rank failed": (NO_MODEL | OF_A_RANK, Outcome.NO_MODEL),
    "it wrote no model, and another host failed": (NO_MODEL | REASON, Outcome.FAILED_ELSEWHERE),
    "it wrote no model, and another host was asked to stop": (
        NO_MODEL | TO_STOP,
        Outcome.STOPPED_ELSEWHERE,
    ),
    "another host failed": (REASON, Outcome.FAILED_ELSEWHERE),
    "another host failed, and this one, too": (
        REASON | {"failed": True},
        Outcome.FAILED_ELSEWHERE,
    ),
    "a signal came, and another host failed": (
        REASON | {"failed": True, "asked": True},
        Outcome.STOPPED,
    ),
    "a rank failed, and the program says why": (OF_A_RANK | {"failed": True}, Outcome.FAILED),
    "a rank failed, and the program ended well": (OF_A_RANK, Outcome.SUCCESS),
    "a rank failed, and this process ended the program": (
        OF_A_RANK | {"failed": True, "ended_by_us": True},
        Outcome.FAILED_ELSEWHERE,
    ),
    "a rank lost another, and a better reason came": (
        OF_A_RANK | {"failed": True, "unexplained": True},
        Outcome.FAILED_ELSEWHERE,
    ),
    "a rank lost another, and no reason came": (
        {"failed": True, "unexplained": True},
        Outcome.FAILED,
    ),
    "another host was asked to stop": (TO_STOP, Outcome.STOPPED_ELSEWHERE),
    "both hosts were asked to stop": (
        TO_STOP | {"failed": True, "asked": True},
        Outcome.STOPPED_ELSEWHERE,
    ),
    "a rank was asked to stop": (
        TO_STOP | OF_A_RANK | {"failed": True},
        Outcome.STOPPED_ELSEWHERE,
    ),
    "a rank was killed, and its launcher asked the others to stop": (
        TO_STOP | OF_A_RANK | {"failed": True, "killed": True},
        Outcome.FAILED,
    ),
    "a rank was killed, and another host was asked to stop": (
        TO_STOP | {"failed": True, "killed": True},
        Outcome.STOPPED_ELSEWHERE,
    ),
    "a rank was killed, and the job was asked to stop": (
        TO_STOP | OF_A_RANK | {"failed": True, "killed": True, "asked": True},
        Outcome.STOPPED,
    ),
    "a rank was asked to stop, and all ended well": (TO_STOP | OF_A_RANK, Outcome.SUCCESS),
}


@pytest.mark.parametrize(("known", "expected"), CASES.values(), ids=CASES)
def test_the_outcome_of_a_programs_end(known: dict[str, bool], expected: Outcome):
    assert outcome(Known(**{"failed": False} | known)) is expected
