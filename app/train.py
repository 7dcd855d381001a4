"""Trains a model and writes it down: environment and flags -> fit -> test -> export.

    python app/train.py --data=CIFAR10DataModule --data.data_dir=DIR --trainer.max_epochs=5     on a desk
    docker run IMAGE train                                                                      as SageMaker does
    docker run IMAGE python app/train.py --help                                                 all flags

`app/train_multi_node.py` and `app/train_torchrun.py` start it on several nodes or devices. Without SageMaker's
variables everything goes below ./output.
"""

if __name__ == "__main__":  # before all else: what is imported takes seconds
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
    # Accuracies that nobody had measured.
    renamed_recipes={
        "cifar10-94": "fast",
        "cifar10-96": "accurate",
    },
)


def main(args: list[str] | None = None) -> None:
    """Train as `args` (sys.argv's if None) say; exits with a status above 0 if the model was not written."""
    run.main(APPLICATION, args)


if __name__ == "__main__":
    main()
