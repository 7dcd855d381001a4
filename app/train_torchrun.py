"""Starts app/train.py on this node by torchrun, with one process for each device.

    docker run -e SAGEMAKER_PROGRAM=app/train_torchrun.py IMAGE train
    python app/train_torchrun.py FLAGS

--trainer.devices=N starts N processes on a CPU. --max_restarts=N starts all ranks again when one
has died, up to N times. torchrun's own documentation:
https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from pathlib import Path

from sagemaker_lightning.contract.shutdown import leave_at_once
from sagemaker_lightning.launch import torchrun_command
from sagemaker_lightning.process import start_notice


def main(args: list[str] | None = None) -> None:
    """Replace this process by torchrun."""
    torchrun_command.main(Path(__file__).with_name("train.py"), args)


if __name__ == "__main__":
    leave_at_once()
    start_notice.begin("importing torch")
    main()
