"""Reports how a program ends: in one line, in the log and as the job's FailureReason."""

import builtins
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sagemaker_lightning.contract.environment import (
    SageMakerEnvironment,
    failure_file,
    host_and_rank,
)
from sagemaker_lightning.contract.failures import reported, write
from sagemaker_lightning.contract.log import say_last


@contextmanager
def report_failures(job: SageMakerEnvironment | None = None) -> Iterator[None]:
    """Turn an exception of the block into one line, a job's failure file and exit status 1.

        with report_failures():
            trainer.fit(model)

    A UserError is shown as its line alone, any other error with its traceback. In a job, the line
    and the end of the traceback are written to the failure file, which becomes the job's
    FailureReason, and the line names host and rank. An interruption, which is a SystemExit, passes.

    Outside of a job, a notebook, an interactive session and a test of pytest get the exception
    itself: they show it, and continue.

    Args:
        job: The job's environment; None if it is not known yet. It names the host.
    """
    file = failure_file()
    if file is None and _shows_exceptions():
        yield
        return
    where = host_and_rank()
    if job:
        where = f"host {job.current_host}, {where.partition(', ')[2]}"
    with reported(file, where):
        yield


def report_stop(why: str, loud: bool = True) -> None:
    """Report that this process stops because it was asked to, and where to resume.

    Args:
        why: What happened, in one line.
        loud: Whether to print the line and to write it to a job's failure file. If not, another
            process of this host does so.
    """
    if not loud:
        return
    message = f"{why} [{host_and_rank()}]"
    with suppress(OSError):  # nobody reads it, such as on a terminal that is closed
        say_last(message)
    if file := failure_file():
        with suppress(OSError):
            write(file, message)


def _shows_exceptions() -> bool:
    """Return whether this process shows an exception and continues.

    Python sets `sys.ps1` in an interactive session, IPython and with it Jupyter `__IPYTHON__`, and
    pytest PYTEST_CURRENT_TEST, each of them documented.
    """
    return (
        hasattr(sys, "ps1")
        or hasattr(builtins, "__IPYTHON__")
        or "PYTEST_CURRENT_TEST" in os.environ
    )
