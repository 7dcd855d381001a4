"""torchrun, which ends as its ranks do when it is told to stop: with their exit status, and without a traceback.

python sagemaker_lightning/launch/torchrun.py FLAGS PROGRAM ...      as `python -m torch.distributed.run`
"""

import os
import sys

if __name__ == "__main__":  # before all else: what is imported takes seconds
    from sagemaker_lightning.contract.shutdown import leave_at_once

    leave_at_once()

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from sagemaker_lightning.contract.shutdown import SIGNALS, status
from sagemaker_lightning.process.parent_process import launches

if __name__ == "__main__":
    launches(os.environ)
    try:
        main()
    except SignalException as error:
        print(f"torchrun: {error}", file=sys.stderr, flush=True)
        sys.exit(status(error.sigval))
    except ChildFailedError as error:
        ended = {failure.exitcode for failure in error.failures.values()}
        if not ended <= {status(number) for number in SIGNALS}:
            raise
        sys.exit(max(ended))  # a rank alone was told to stop, and all have agreed on it
