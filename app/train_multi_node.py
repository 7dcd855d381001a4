"""Starts app/train.py on this node, where Lightning starts one process for each device.

    docker run IMAGE train              it is the image's SAGEMAKER_PROGRAM: the toolkit runs it on every node
    python app/train_multi_node.py FLAGS

On one node it is app/train.py, and nothing more.
"""

if __name__ == "__main__":  # before all else: what is imported takes seconds
    from sagemaker_lightning.process.start import before_lightning

    before_lightning()

import os

from sagemaker_lightning.contract import rendezvous
from sagemaker_lightning.contract.environment import Environment, failure_file, place
from sagemaker_lightning.contract.failures import reported
from sagemaker_lightning.process import start_notice

from app import train


def main(args: list[str] | None = None) -> None:
    """Set what the user has not set of torch.distributed's and the network's variables, and train."""
    with reported(failure_file(), place()):
        environment = Environment.read()
        if len(environment.hosts) > 1:
            start_notice.doing("waiting for the other hosts")
        os.environ.update(rendezvous.prepared(environment) | os.environ)
    train.main(args)


if __name__ == "__main__":
    main()
