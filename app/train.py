"""Trains a model, tests it and exports it, as environment and flags say.

On a desk:

    python app/train.py --data=CIFAR10DataModule --data.data_dir=DIR --trainer.max_epochs=5

As SageMaker does, and to see all flags:

    docker run IMAGE train
    docker run IMAGE python app/train.py --help

`app/train_multi_node.py` and `app/train_torchrun.py` start it on several nodes or devices. Without
SageMaker's variables, all files are written below ./output.
"""

if __name__ == "__main__":  # first of all: the imports below take seconds
    from sagemaker_lightning.process.start import before_lightning

    before_lightning()

from pathlib import Path

from sagemaker_lightning.cli import application, run

from app.data import CIFAR10DataModule, DigitsDataModule
from app.model import ResNet18

HERE = Path(__file__).parent
APPLICATION = application.Application(
    model=ResNet18,
    data=DigitsDataModule,
    channel_data=CIFAR10DataModule,
    settings=HERE / "trainer.yaml",
    recipes=HERE / "recipes",
)


def main(args: list[str] | None = None) -> None:
    """Train as `args` say; if they are None, as sys.argv says.

    The process exits with a status above 0 if the model was not written.
    """
    run.main(APPLICATION, args)


if __name__ == "__main__":
    main()
