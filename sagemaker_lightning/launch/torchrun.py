"""Runs torchrun so that a stop on request ends it without a traceback.

Its exit status is then that of its ranks.

    python sagemaker_lightning/launch/torchrun.py FLAGS PROGRAM ...

takes the same arguments as `python -m torch.distributed.run`.
"""

import logging
import os
import sys

if __name__ == "__main__":  # before all else, because the imports below take seconds
    from sagemaker_lightning.contract.shutdown import leave_at_once

    leave_at_once()

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.run import main

from sagemaker_lightning.contract.log import say_last
from sagemaker_lightning.contract.shutdown import SIGNALS, status
from sagemaker_lightning.process.parent_process import become_launcher

if __name__ == "__main__":
    become_launcher(os.environ)
    # A signal that comes once torchrun has begun to end interrupts its last steps. torch writes
    # that as an error with its traceback, after the reason of the failure.
    logging.getLogger(api.__name__).addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], SignalException))
    )
    try:
        main()
    except SignalException as error:
        say_last(f"torchrun: {error}")
        sys.exit(status(error.sigval))
    except ChildFailedError as error:
        statuses = {failure.exitcode for failure in error.failures.values()}
        if not statuses <= {status(number) for number in SIGNALS}:
            raise
        # Only a rank was asked to stop, not torchrun, and all ranks have agreed to stop.
        sys.exit(max(statuses))
