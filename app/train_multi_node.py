"""Starts app/train.py on this node, where Lightning starts one process for each device.

    docker run IMAGE train              it is the image's SAGEMAKER_PROGRAM: the toolkit runs it on every node
    python app/train_multi_node.py FLAGS

On one node it is app/train.py, and nothing more.
"""

if __name__ == "__main__":  # before all else: what is imported takes seconds
    from app import starting
    from app.imports import import_lightning
    from app.stop import leave_at_once

    leave_at_once()
    starting.begin("importing torch and Lightning")
    import_lightning()

import os

from app import rendezvous, starting, train
from app.environment import Environment, failure_file, place
from app.failures import reported


def main(args: list[str] | None = None) -> None:
    """Set what the user has not set of torch.distributed's and the network's variables, and train."""
    with reported(failure_file(), place()):
        environment = Environment.read()
        if len(environment.hosts) > 1:
            starting.doing("waiting for the other hosts")
        os.environ.update(rendezvous.prepared(environment) | os.environ)
    train.main(args)


if __name__ == "__main__":
    main()
