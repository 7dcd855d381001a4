"""Gives each sample the same weight in the gradient, however many a rank has."""

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor, tensor

from sagemaker_lightning.compat.model_parallel import data_rank, data_ranks
from sagemaker_lightning.data.deterministic import divided


class GradientWeighting(Callback):
    """Makes the gradient of several ranks that of one process with all their samples.

        trainer = Trainer(devices=4, strategy="ddp", callbacks=[GradientWeighting()])

    DDP takes the mean of the ranks' gradients. If one rank has 4 samples in a batch and another one
    3, each of the 3 counts for more. This callback weights a rank's gradient by its share of the
    samples of all ranks, provided that the loss is the mean over the rank's samples. The ranks tell
    each other how many samples they have, before each step. With one rank, it does nothing.

    The number of samples is the size of the first dimension of the first tensor in the batch, as
    Lightning's `self.log` takes it.

    ExactResume and RankConsistency do this themselves with the loaders that they share out.
    """

    def __init__(self) -> None:
        self.weight: float | Tensor = 1.0
        """What multiplies this rank's gradients in this step; a tensor has shape ()."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Learn how many samples all ranks have; all ranks call it."""
        if trainer.world_size > 1:
            own = tensor(float(extract_batch_size(batch)), device=pl_module.device)
            total = trainer.strategy.reduce(own.clone(), reduce_op="sum")
            self.weight = own * trainer.world_size / total

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Weight this rank's gradient."""
        weight_gradients(loss, self.weight)


def weight_gradients(loss: Tensor, share: float | Tensor) -> None:
    """Multiply the gradients of a loss by `share` when they are computed."""
    if loss.requires_grad and (isinstance(share, Tensor) or share != 1):
        loss.register_hook(lambda gradient: gradient * share)


def share_of_batch(trainer: Trainer) -> float:
    """Return the weight of this rank's gradient if our loaders share out the batch; else 1."""
    loader = divided(trainer.train_dataloader)
    rank, ranks = data_rank(trainer), data_ranks(trainer)
    if ranks == 1 or loader is None:
        return 1.0
    sizes = loader.sizes(trainer.current_epoch, trainer.fit_loop.batch_idx)
    if len(sizes) != ranks:
        # The user's own sampler shares the data out; its slices are not known.
        return 1.0
    return sizes[rank] * len(sizes) / sum(sizes)
