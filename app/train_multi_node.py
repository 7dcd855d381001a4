"""Starts app/train.py on this node; Lightning starts a process for each device.

    docker run IMAGE train
    python app/train_multi_node.py FLAGS

It is the image's SAGEMAKER_PROGRAM: the toolkit runs it on every node. On one node it does nothing
more than app/train.py.
"""

if __name__ == "__main__":  # first of all: the imports below take seconds
    from sagemaker_lightning.process.start import before_lightning

    before_lightning()

import os

from sagemaker_lightning.contract import rendezvous
from sagemaker_lightning.contract.environment import (
    SageMakerEnvironment,
    failure_file,
    host_and_rank,
)
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.process import start_notice

from app import train


def main(args: list[str] | None = None) -> None:
    """Set variables of torch.distributed and of the network, and train.

    Variables that the user has set stay as they are.
    """
    with reported(failure_file(), host_and_rank()):
        environment = SageMakerEnvironment.read()
        if len(environment.hosts) > 1:
            start_notice.set_activity("waiting for the other hosts")
        rendezvous.join(environment, os.environ)
    train.main(args)


if __name__ == "__main__":
    main()
