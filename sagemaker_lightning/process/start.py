"""What a program does first, before it imports torch, which takes seconds."""

import os

from sagemaker_lightning.contract import streams
from sagemaker_lightning.contract.log import ON_STDERR, log
from sagemaker_lightning.contract.shutdown import leave_at_once
from sagemaker_lightning.process.parent_process import end_with_launcher


def before_lightning() -> None:
    """Handle signals, announce a slow start, and import torch and Lightning.

    It imports torchvision as well, all in the quickest way. From the beginning, a rank ends with
    its launcher.
    """
    streams.prepare()
    leave_at_once()
    end_with_launcher(os.environ)

    from sagemaker_lightning.contract.environment import failure_file, host_and_rank
    from sagemaker_lightning.contract.errors import UserError
    from sagemaker_lightning.contract.failures import address_limit, reported
    from sagemaker_lightning.process import start_notice
    from sagemaker_lightning.process.lightning_import import import_lightning

    start_notice.begin("importing torch and Lightning")
    if limit := address_limit():  # glibc may end a process that needs more, without a word of why
        log.warning(f"{limit}; importing torch takes several", extra=ON_STDERR)
    with reported(failure_file(), host_and_rank()):
        try:
            import_lightning()
        except (ImportError, MemoryError, OSError) as error:
            if not limit:
                raise
            raise UserError(f"{limit}, and importing torch needs more ({error})") from None


def before_torch() -> None:
    """Handle signals, announce a slow start, and prepare the threads of torch.

    It imports neither torch nor Lightning.
    """
    streams.prepare()
    leave_at_once()
    end_with_launcher(os.environ)

    from sagemaker_lightning.process import start_notice, threads

    start_notice.begin("importing torch")
    threads.prepare()
