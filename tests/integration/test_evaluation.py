"""trainer.validate, test and predict with our callbacks, without a training.

They are Lightning's own methods for a model that exists already.
"""

import sys
from pathlib import Path

import nightly
import pytest
import ranks
import torch
from foreign import Data, Model

from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment

from app.train import APPLICATION

FLAGS = [
    "--trainer.accelerator=cpu",
    "--data=test_evaluation.Samples",
    "--model=test_evaluation.Evaluated",
]


class Samples(Data):
    def test_dataloader(self):
        return self.train_dataloader()

    predict_dataloader = test_dataloader


class Evaluated(Model):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])


def cli(*flags: str) -> CommandLine:
    """Return what the flags make, with the folders of a desk."""
    sys.argv = ["evaluate.py"]
    return CommandLine(SageMakerEnvironment(), [*FLAGS, *flags], APPLICATION)


def evaluated(flags: list[str]) -> dict[str, float]:
    """Evaluate a model that was not trained, and return the metrics."""
    command_line = cli(*flags)
    metrics = command_line.trainer.validate(command_line.model, command_line.datamodule)[0]
    metrics |= command_line.trainer.test(command_line.model, command_line.datamodule)[0]
    predicted = command_line.trainer.predict(command_line.model, command_line.datamodule)
    assert predicted[0].shape == (8, 2)
    return metrics


@pytest.fixture
def at_a_desk(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "support"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "flags", nightly.all_but([[]], [[], ["--resume.exact=false"]]), ids=" ".join
)
def test_a_model_without_trained_weights(at_a_desk, capfd, flags):
    metrics = evaluated(flags)
    assert metrics["val_loss"] == pytest.approx(metrics["test_loss"])  # they are the same samples
    assert "Error" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--resume.exact=false"]], ids=" ".join)
def test_after_a_training(at_a_desk, flags):
    command_line = cli("--trainer.max_epochs=1", *flags)
    command_line.trainer.fit(command_line.model, command_line.datamodule)
    trained = float(command_line.trainer.callback_metrics["val_loss"])
    assert command_line.trainer.validate(command_line.model, command_line.datamodule)[0][
        "val_loss"
    ] == pytest.approx(trained)
    assert command_line.trainer.test(command_line.model, command_line.datamodule)[0][
        "test_loss"
    ] == pytest.approx(trained)


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path):
    ended = ranks.run(evaluated, ["--trainer.strategy=ddp", "--trainer.devices=2"], folder=tmp_path)
    assert not [ended_rank.error for ended_rank in ended if ended_rank.error], ended[0].output
    assert ended[0].value == ended[1].value
