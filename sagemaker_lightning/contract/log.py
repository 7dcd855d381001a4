"""The runtime's logger, which writes plain lines unless the user gives it a handler.

    logging.getLogger("sagemaker_lightning").setLevel(logging.WARNING)

leaves the warnings: what makes a resumed run another one, and what is lost or ignored.
"""

import logging
import sys

ON_STDERR = {"on_stderr": True}
"""The `extra` of a message that is written to stderr."""

log = logging.getLogger("sagemaker_lightning")


class PlainHandler(logging.Handler):
    """Writes each message as a line, to what is sys.stdout or sys.stderr at that moment.

    A warning begins with "warning: ": people search a long log for it.

    It raises what writing raises, unlike logging's own handlers: a training whose lines nobody
    reads ends (contract/streams.py).
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        stream = sys.stderr if getattr(record, "on_stderr", False) else sys.stdout
        mark = "warning: " if record.levelno == logging.WARNING else ""
        print(mark + self.format(record), file=stream, flush=True)


if not log.handlers:
    log.addHandler(PlainHandler())
    log.propagate = False  # SageMaker's toolkit gives the root logger a handler: lines came twice
if log.level == logging.NOTSET:
    log.setLevel(logging.INFO)


def say_last(text: str) -> None:
    """Write to stderr with which words this process ends.

    They do not go through the logger: no setting of it may hide why a program has ended, as none
    hides Python's own traceback. The process that has started this one reads them there, too.
    """
    print(text, file=sys.stderr, flush=True)
