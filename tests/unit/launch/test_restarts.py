"""launch/restarts.py: whether a program is started again, as a table."""

import pytest

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import LAST_LINE, NO_LINE
from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.launch import restarts
from sagemaker_lightning.launch.restarts import VARIABLE, WINDOW_SECONDS, Restarts
from sagemaker_lightning.nodes.messages import Fault, FaultKind

KILLED = "host algo-2, local rank 1 ended without giving a reason: it was killed by SIGKILL"
NOW = 10_000.0
DEATH = Fault(KILLED, FaultKind.DEATH, 7)
EARLY_DEATH = Fault(KILLED, FaultKind.DEATH)
ERROR = Fault("ValueError: boom", FaultKind.ERROR, 7)
EARLY_ERROR = Fault("ValueError: boom", FaultKind.ERROR)
EFFECT = Fault(KILLED, FaultKind.EFFECT, 7)
STOP = Fault("interrupted, resume from step 3: SIGTERM", FaultKind.STOP, 7)
MISTAKE = Fault("--a: found 1, expected 2", FaultKind.MISTAKE)


def taken(why: str = "another fault", step: int | None = 3, ago: float = 1.0) -> ContainerRestart:
    return ContainerRestart(why, step, NOW - ago)


TABLE = {
    "a rank was killed": ([DEATH], [], ""),
    "a rank was killed before the first step": ([EARLY_DEATH], [], ""),
    "an error while it trained": ([ERROR], [], ""),
    "an error before the first step": ([EARLY_ERROR], [], "no step was trained"),
    "a mistake": ([MISTAKE], [], "the same would happen again"),
    "a mistake on one of two hosts": ([DEATH, MISTAKE], [], "the same would happen again"),
    "a stop": ([STOP], [], "the job was asked to stop"),
    "a stop while a rank of another host dies": ([DEATH, STOP], [], "the job was asked to stop"),
    "a rank of another host was killed": ([EFFECT, DEATH], [], ""),
    "nobody knows the cause": ([EFFECT, EFFECT], [], ""),
    "hosts never met": ([Fault("lost algo-2", FaultKind.EFFECT)], [], "no step was trained"),
    "a host that is gone": ([EFFECT, None], [], "host 1 is gone"),
    "the same at another step": ([DEATH], [taken(KILLED, 6)], ""),
    "another fault at the same step": ([DEATH], [taken(step=7)], ""),
    "the same at the same step": ([DEATH], [taken(KILLED, 7)], "it came back at the same step"),
    "the same, of another process": (
        [Fault("rank 3 (pid 99): CUDA error at 0xfe", FaultKind.DEATH, 7)],
        [taken("rank 2 (pid 1): CUDA error at 0x1", 7)],
        "it came back at the same step",
    ),
    "the same, on a host of several": (
        [Fault("x ended with exit status 1: ValueError: boom", FaultKind.ERROR, 7)],
        [taken("host algo-2: x ended with exit status 1: ValueError: boom", 7)],
        "it came back at the same step",
    ),
    "the same, by another launcher": (
        [Fault("x: the rank with PID 99 was killed by SIGSEGV", FaultKind.DEATH, 7)],
        [taken("x: rank 1 was killed by SIGSEGV", 7)],
        "it came back at the same step",
    ),
    "a loss that a rank hears of in another way": (
        [Fault("x ended with exit status 134: lost a peer (closed)", FaultKind.DEATH, 7)],
        [taken("x ended with exit status 1: lost a peer (reset)", 7)],
        "it came back at the same step",
    ),
    "the same, after another last line": (
        [Fault(f"x ended with exit status 1: {LAST_LINE}step=7", FaultKind.DEATH, 7)],
        [taken(f"x ended with exit status 1: {LAST_LINE}saved", 7)],
        "it came back at the same step",
    ),
    "the same, after no last line": (
        [Fault(f"x ended with exit status 1: {LAST_LINE}step=7", FaultKind.DEATH, 7)],
        [taken(f"x ended with exit status 1: {NO_LINE}", 7)],
        "it came back at the same step",
    ),
    "the same before the next step": (
        [Fault(KILLED, FaultKind.DEATH, None, 7)],
        [taken(KILLED, 7)],
        "it came back at the same step",
    ),
    "the same before another step": (
        [Fault(KILLED, FaultKind.DEATH, None, 6)],
        [taken(KILLED, 7)],
        "",
    ),
    "the same before the first step": (
        [Fault(KILLED, FaultKind.DEATH, None, 0)],
        [taken(KILLED, 0)],
        "it came back at the same step",
    ),
    "an error before the next step": (
        [Fault("ValueError: boom", FaultKind.ERROR, None, 7)],
        [],
        "no step was trained",
    ),
    "the same error before the next step": (
        [Fault("ValueError: boom", FaultKind.ERROR, None, 7)],
        [taken("host algo-2: ValueError: boom", 7)],
        "it came back at the same step",
    ),
    "the same error of another temporary file and another loss": (
        [Fault("x: OSError: no '/tmp/tmpab_c/x' (loss nan) in tmp2/y", FaultKind.ERROR, 7)],
        [taken("x: OSError: no '/tmp/tmpx7kn/x' (loss 7.9e-12) in tmp3z/y", 7)],
        "it came back at the same step",
    ),
    "another error of the same class": (
        [Fault("x: ValueError: no input", FaultKind.ERROR, 7)],
        [taken("x: ValueError: no target", 7)],
        "",
    ),
    "the same at the start": ([EARLY_DEATH], [taken(KILLED, None)], ""),
    "the same at the start, again": ([EARLY_DEATH], [taken(KILLED, None)] * 2, "it came back"),
    "others at the start": ([EARLY_DEATH], [taken(KILLED, None), taken("x", None)], ""),
    "the same after another": ([DEATH], [taken(KILLED, 7), taken()], ""),
    "the last of three": ([DEATH], [taken()] * 2, ""),
    "the same, as the watch and as the launcher say it": (
        [Fault("host a: the rank with PID 7 ended: it was killed by SIGSEGV", FaultKind.DEATH, 7)],
        [taken("own.py: rank 1 was killed by SIGSEGV", 7)],
        "it came back at the same step",
    ),
    "another signal": (
        [Fault("own.py: rank 1 was killed by SIGSEGV", FaultKind.DEATH, 7)],
        [taken("own.py: rank 1 was killed by SIGBUS", 7)],
        "",
    ),
    "too many": ([DEATH], [taken()] * 3, "the limit within 60 minutes is 3"),
    "as many, long ago": ([DEATH], [taken(ago=WINDOW_SECONDS)] * 5, ""),
}


@pytest.mark.parametrize(("faults", "before", "why_not"), TABLE.values(), ids=TABLE)
def test_whether_a_program_is_started_again(faults, before, why_not):
    by_host = {f"host {number}": fault for number, fault in enumerate(faults)}
    assert Restarts(taken=before).why_not(by_host, NOW) == why_not


def test_restarts_are_off():
    assert Restarts(most=0).why_not({"a": DEATH}, NOW) == "restarts are off"


def test_the_cause_is_what_caused_the_others():
    assert restarts.cause({"a": EFFECT, "b": DEATH}) is DEATH
    assert restarts.cause({"a": EFFECT, "b": DEATH, "c": ERROR}) is ERROR
    assert restarts.last_step([EARLY_DEATH, DEATH, Fault("x", FaultKind.EFFECT, 9)]) == 9
    assert restarts.last_step([EARLY_DEATH]) is None


def test_the_last_line_says_how_many_restarts_there_were():
    assert Restarts().summary("x") == ""
    line = "after 1 restart in the container: it came back"
    assert Restarts(taken=[taken()]).summary("it came back") == line
    assert Restarts(taken=[taken()] * 2).summary("x").startswith("after 2 restarts in")


@pytest.mark.parametrize(
    ("sent", "number"),
    [({}, 3), ({"max_restarts": "0"}, 0), ({"max-restarts": 2}, 2), ({"max_restarts": '"5"'}, 5)],
)
def test_how_many_a_job_allows(sent, number):
    assert restarts.most(sent, {}) == number


def test_the_hyperparameter_comes_before_the_variable():
    assert restarts.most({}, {VARIABLE: "7"}) == 7
    assert restarts.most({"max_restarts": "1"}, {VARIABLE: "7"}) == 1


@pytest.mark.parametrize("value", ["often", "-1", "1.5", "", "9" * 7, "٣"])
def test_a_wrong_number_is_refused(value):
    with pytest.raises(UserError, match=r"^--max_restarts: found .*, expected a number, 0 or mo"):
        restarts.most({"max_restarts": value}, {})
    with pytest.raises(UserError, match=f"^{VARIABLE}: found "):
        restarts.most({}, {VARIABLE: value})
