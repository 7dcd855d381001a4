"""compat/lightning_loaders.py: how Lightning prepares loaders, and where they are."""

import types

import pytest
import pytorch_lightning

from sagemaker_lightning.compat import lightning_loaders


@pytest.mark.parametrize("shares", [True, False])
def test_a_loader_that_is_prepared_without_a_sampler(shares):
    """What the trainer was given is as before, even after an error."""
    connector = types.SimpleNamespace(use_distributed_sampler=shares)

    class Data:
        def _prepare_dataloader(self, dataloader, shuffle, mode):
            return connector.use_distributed_sampler, 1 / dataloader, shuffle, mode

    trainer = types.SimpleNamespace(_accelerator_connector=connector, _data_connector=Data())
    lightning_loaders.evaluate_everything_on_each_rank(trainer)
    prepare = lightning_loaders.preparation(trainer)
    assert prepare(4, True, "test") == (False, 0.25, True, "test")
    with pytest.raises(ZeroDivisionError):
        prepare(0, True, "test")
    assert lightning_loaders.shares_loaders(trainer) is shares
    lightning_loaders.restore_preparation(trainer)
    lightning_loaders.restore_preparation(trainer)
    prepared = lightning_loaders.preparation(trainer)(4, False, "fit")
    assert prepared == (shares, 0.25, False, "fit")
    assert lightning_loaders.flattened(None) == []


def test_a_loader_forgets_where_it_was():
    loader = lightning_loaders.PositionedLoader([[1, 2], [3, 4]], "min_size")
    loader.forget_iterators()
    iter(loader)
    next(loader)
    assert loader._iterator.iterators
    loader.forget_iterators()
    assert not loader._iterator.iterators and loader._state_dicts() == []


def fit(model: pytorch_lightning.LightningModule, callback: pytorch_lightning.Callback, **options):
    """Train for one epoch of four batches, and return the trainer."""
    trainer = pytorch_lightning.Trainer(
        **{"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0} | options,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return trainer
