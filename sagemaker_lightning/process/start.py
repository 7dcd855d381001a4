"""What a program does first, before it imports torch, which takes seconds."""

import os

from sagemaker_lightning.contract.shutdown import leave_at_once
from sagemaker_lightning.process.parent_process import end_with_launcher


def before_lightning() -> None:
    """Handle signals, announce a slow start, and import torch and Lightning.

    It imports torchvision as well, all in the quickest way. From the beginning, a rank ends with
    its launcher.
    """
    leave_at_once()
    end_with_launcher(os.environ)

    from sagemaker_lightning.process import start_notice
    from sagemaker_lightning.process.lightning_import import import_lightning

    start_notice.begin("importing torch and Lightning")
    import_lightning()


def before_torch() -> None:
    """Handle signals, announce a slow start, and prepare the threads of torch.

    It imports neither torch nor Lightning.
    """
    leave_at_once()
    end_with_launcher(os.environ)

    from sagemaker_lightning.process import start_notice, threads

    start_notice.begin("importing torch")
    threads.prepare()
