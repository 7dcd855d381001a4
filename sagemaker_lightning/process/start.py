"""What a program does first, before it imports torch, which takes seconds."""

from sagemaker_lightning.contract.shutdown import leave_at_once


def before_lightning() -> None:
    """Hear signals, say what takes long, and import torch, torchvision and Lightning in the quickest way."""
    leave_at_once()

    from sagemaker_lightning.process import start_notice
    from sagemaker_lightning.process.lightning_import import import_lightning

    start_notice.begin("importing torch and Lightning")
    import_lightning()


def before_torch() -> None:
    """Hear signals, say what takes long, and prepare the threads of torch, without Lightning."""
    leave_at_once()

    from sagemaker_lightning.process import start_notice, threads

    start_notice.begin("importing torch")
    threads.prepare()
