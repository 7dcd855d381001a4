"""compat/lightning_loops.py: where the loops are, and what they have of ours."""

import pytorch_lightning
import torch
from boring_fits import fit
from pytorch_lightning.demos.boring_classes import BoringModel

from sagemaker_lightning.compat import lightning_loops


class Watches(pytorch_lightning.Callback):
    """Asks the loops where they are."""

    def __init__(self) -> None:
        self.batches = []
        self.validations = []

    def on_train_batch_end(self, trainer, *_):
        self.batches.append(
            (
                lightning_loops.gradients_accumulate(trainer),
                lightning_loops.batches_are_done(trainer),
                lightning_loops.epoch_is_done(trainer),
            )
        )

    def on_validation_start(self, trainer, pl_module):
        was_training = pl_module.training
        lightning_loops.end_evaluation_mode(trainer)
        self.validations.append(
            (
                was_training,
                pl_module.training,
                lightning_loops.epoch_of_loaders(trainer),
                lightning_loops.epoch_of_validation_loaders(trainer),
            )
        )


def test_where_lightnings_loops_are():
    watches = Watches()
    options = {"max_epochs": 3, "max_steps": 5, "accumulate_grad_batches": 2}
    trainer = fit(
        BoringModel(),
        watches,
        **options,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=2,
    )
    assert watches.batches == [
        *2
        * [(True, False, False), (False, False, False), (True, False, False), (False, True, True)],
        (True, False, False),
        (False, False, True),
    ]
    assert watches.validations[:2] == [(False, True, 0, 0)] * 2
    assert lightning_loops.epoch_of_validation_loaders(trainer) == watches.validations[-1][3]
    assert lightning_loops.fetcher(trainer) is None


def test_a_batch_is_moved_as_training_does_it():
    """The hooks hear that it is of the first loader, as in training."""

    class Moves(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.asked = []

        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.asked.append(("before", dataloader_idx))
            return batch + 1

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            self.asked.append(("move", dataloader_idx))
            return batch * 2

    class Transfers(pytorch_lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.moved = lightning_loops.transfer_batch(trainer, torch.ones(2))

    model = Moves()
    fit(model, Transfers(), limit_train_batches=1)
    assert model.moved.tolist() == [4, 4]
    assert model.asked == 2 * [("before", 0), ("move", 0)]


def test_loops_are_lightnings_again():
    """What they have of ours is gone, even if it was never there."""
    trainer = pytorch_lightning.Trainer(max_steps=3, accelerator="cpu", logger=False)
    loop = trainer.fit_loop
    classes = [type(each) for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop)]
    attributes = set(vars(loop.epoch_loop))
    lightning_loops.disable_signal_broadcast(trainer)
    assert loop.epoch_loop._broadcast_sigterm_tensor() is None
    loop.__class__ = lightning_loops.FitLoop
    loop.epoch_loop.__class__ = lightning_loops.EpochLoop
    loop.restarting = True
    assert loop.restarting
    loop.unset_restarting()
    assert not loop.restarting
    for _ in range(2):
        loops = lightning_loops.restore_lightning_classes(trainer)
    assert [type(each) for each in loops] == classes
    assert set(vars(loop.epoch_loop)) == attributes
