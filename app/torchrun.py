"""torchrun, without the traceback that it ends with when it is told to stop: the reason is said by who has failed.

python app/torchrun.py FLAGS PROGRAM ...      as `python -m torch.distributed.run`
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException as error:
        print(f"torchrun: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
