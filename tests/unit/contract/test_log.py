"""contract/log.py: plain lines on stdout, until a user has them elsewhere."""

import io
import logging
import os
import subprocess
import sys

import pytest
from containers import ROOT

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import ON_STDERR, log, say_last


@pytest.fixture
def users():
    """Yield the logger as a user gets it; what the test changes of it is undone."""
    logger = logging.getLogger("sagemaker_lightning")
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers = handlers
    logger.setLevel(level)


def test_a_message_is_a_plain_line(capsys):
    log.info("resuming from step 3: 100 %s")
    log.warning("no such interface", extra=ON_STDERR)
    log.debug("nothing for a user")
    captured = capsys.readouterr()
    assert captured.out == "resuming from step 3: 100 %s\n"
    assert captured.err == "warning: no such interface\n"


def test_a_line_goes_to_what_is_stdout_at_that_moment(monkeypatch):
    monkeypatch.setattr(sys, "stdout", later := io.StringIO())
    log.info("to a notebook's cell")
    monkeypatch.setattr(sys, "stdout", None)  # as without a console
    log.info("to nobody")
    assert later.getvalue() == "to a notebook's cell\n"


def test_a_handler_of_the_users_takes_the_place_of_ours(users, capsys):
    users.handlers = [theirs := logging.StreamHandler(file := io.StringIO())]
    theirs.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    log.info("resuming from step 3")
    log.warning("another seed", extra=ON_STDERR)
    assert capsys.readouterr() == ("", "")
    assert file.getvalue() == (
        "INFO sagemaker_lightning resuming from step 3\nWARNING sagemaker_lightning another seed\n"
    )


def test_a_level_leaves_the_warnings(users, capsys):
    users.setLevel(logging.WARNING)
    log.info("resuming from step 3")
    log.warning("another seed")
    assert capsys.readouterr() == ("warning: another seed\n", "")


def test_no_setting_hides_why_a_program_ends(users, capsys):
    users.handlers = [logging.NullHandler()]
    users.setLevel(logging.CRITICAL)
    say_last("error: no data")
    assert capsys.readouterr() == ("", "error: no data\n")


def test_what_writing_raises_reaches_the_training(monkeypatch):
    """contract/streams.py raises it if nobody reads stdout."""

    class Unread(io.StringIO):
        def write(self, text):
            raise UserError("stdout: cannot be written to")

    monkeypatch.setattr(sys, "stdout", Unread())
    with pytest.raises(UserError, match="cannot be written to"):
        log.info("resuming from step 3")


FIRST = """
import logging
theirs = logging.getLogger("sagemaker_lightning")
{settings}
logging.basicConfig(format="root: %(message)s")
from sagemaker_lightning.contract.log import log
log.info("information")
log.warning("a warning")
"""


@pytest.mark.parametrize(
    ("settings", "stdout", "stderr"),
    [
        ("", "information\nwarning: a warning\n", ""),
        ("theirs.setLevel('WARNING')", "warning: a warning\n", ""),
        (
            "theirs.addHandler(logging.StreamHandler())",
            "",
            "information\nroot: information\na warning\nroot: a warning\n",
        ),
        ("theirs.addHandler(logging.NullHandler()); theirs.propagate = False", "", ""),
    ],
)
def test_what_was_set_before_the_import_stays(settings, stdout, stderr):
    """A handler of the root logger, as SageMaker's toolkit gives it, writes no line of ours."""
    ended = subprocess.run(
        [sys.executable, "-S", "-c", FIRST.format(settings=settings)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == (stdout, stderr)
