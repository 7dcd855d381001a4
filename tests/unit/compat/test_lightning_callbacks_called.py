"""compat/lightning_callbacks.py: callbacks that are called early, average, prune or search."""

import types

import pytest
import pytorch_lightning
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from pytorch_lightning.demos.boring_classes import BoringModel

from sagemaker_lightning.compat import lightning_callbacks


def test_an_average_counts_again_even_after_an_error():
    callback = StochasticWeightAveraging(swa_lrs=0.1)
    epoch_before = callback._latest_update_epoch
    with pytest.raises(ZeroDivisionError), lightning_callbacks.weights_averaged_in(callback, 7):
        assert callback._latest_update_epoch == 7
        raise ZeroDivisionError
    assert callback._latest_update_epoch == epoch_before != 7


def test_a_callback_is_called_as_a_run_begins_and_can_log():
    class Early(lightning_callbacks.EarlyCallback):
        def run_begins(self, trainer):
            self.began = trainer

    module = BoringModel()
    trainer = pytorch_lightning.Trainer(accelerator="cpu", logger=False, barebones=True)
    module._trainer = trainer
    callback = Early()
    callback.log = module.log
    assert callback.began is trainer and callback.log == module.log


def test_masks_are_saved_also_of_a_pruning_that_is_permanent():
    permanent, other = (
        ModelPruning("l1_unstructured", make_pruning_permanent=choice) for choice in (True, False)
    )
    trainer = types.SimpleNamespace(callbacks=[object(), permanent, other])
    with (
        pytest.raises(ZeroDivisionError),
        lightning_callbacks.saving_pruning_masks(trainer),
    ):
        assert not permanent._make_pruning_permanent
        raise ZeroDivisionError
    assert permanent._make_pruning_permanent and not other._make_pruning_permanent
    assert not list(lightning_callbacks.original_weights(object()))
    assert not list(lightning_callbacks.original_weights(permanent))


def test_what_a_search_looks_for():
    rate, batch = LearningRateFinder(attr_name="rate"), BatchSizeFinder(batch_arg_name="size")
    for search, name in ((rate, "rate"), (batch, "size"), (LearningRateFinder(), "")):
        assert lightning_callbacks.is_search(search)
        assert lightning_callbacks.searched_attribute(search) == name
    assert not lightning_callbacks.is_search(pytorch_lightning.Callback())
    trainer = types.SimpleNamespace(callbacks=[pytorch_lightning.Callback(), rate, batch])
    assert not lightning_callbacks.is_search_only(trainer)
    batch._early_exit = True
    assert lightning_callbacks.is_search_only(trainer)
