"""Which strategies of Lightning's a run can be resumed with, and what is said of the others."""

import pytest
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume import strategies


@pytest.mark.parametrize(
    ("strategy", "is_supported"),
    [
        (SingleDeviceStrategy("cpu"), True),
        (DDPStrategy(), True),
        (ModelParallelStrategy(), True),
        (DDPStrategy(start_method="spawn"), False),
        (FSDPStrategy(), False),
    ],
)
def test_strategies_with_which_runs_can_be_resumed(strategy, is_supported):
    assert strategies.is_supported(strategy) is is_supported


@pytest.mark.parametrize(
    ("strategy", "has_flag", "says"),
    [
        (FSDPStrategy(), False, r"^Trainer\(strategy=...\): found FSDPStrategy, .*fully_shard\(\)"),
        (FSDPStrategy(), True, "^--trainer.strategy: found FSDPStrategy, .*ModelParallelStrategy"),
        (DDPStrategy(start_method="spawn"), False, "which copies this process, .* of its own$"),
        (DDPStrategy(start_method="spawn"), True, "trains and saves as Lightning does$"),
    ],
)
def test_one_line_says_what_to_use_in_place_of_another_strategy(strategy, has_flag, says):
    with pytest.raises(UserError, match=says):
        raise strategies.unsupported(strategy, has_flag)


def test_a_sharded_model_needs_configure_model():
    trainer = Trainer(strategy=ModelParallelStrategy(), accelerator="cpu", logger=False)
    trainer.strategy._lightning_module = LightningModule()
    with pytest.raises(UserError, match=r"found no configure_model\(\)"):
        strategies.settle_mesh(trainer)


def test_other_strategies_have_no_mesh_to_settle():
    strategies.settle_mesh(Trainer(accelerator="cpu", logger=False))
