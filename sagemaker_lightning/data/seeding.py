"""Random draws of a whole run: functions of (seed, epoch, position)."""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import RunningStage
from pytorch_lightning.utilities import CombinedLoader

from sagemaker_lightning.compat import lightning_loaders
from sagemaker_lightning.compat.lightning_loops import combined_loader
from sagemaker_lightning.compat.model_parallel import data_rank, data_ranks
from sagemaker_lightning.compat.random_generators import entropy_replaced
from sagemaker_lightning.compat.torch_data import end_workers
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.batch_order import Batches, shares_unequally
from sagemaker_lightning.data.deterministic import (
    ReproducibleLoader,
    make_resumable,
    of_class,
    restore_loader,
)
from sagemaker_lightning.data.loaders.several import TrainingLoaders, ValidationLoaders
from sagemaker_lightning.data.loaders.unplaced import UnplacedLoader
from sagemaker_lightning.data.seeded_indices import seed_all, unseeded
from sagemaker_lightning.state.graph.nodes import GENERATOR


def stage_name(stage: RunningStage) -> str:
    """Return the short name of a stage, such as "train"."""
    return {RunningStage.TRAINING: "train", RunningStage.TESTING: "test"}.get(stage, "val")


class Seeding(Callback):
    """Seeds every step; makes the order and samples of DataLoaders reproducible.

    Order and samples become functions of seed, epoch and position. The ranks share the batches of a
    DataLoader, each sample once; with Trainer(use_distributed_sampler=False), its own sampler has
    to share the samples out. An IterableDataset, and a loader of another class, keep their own
    order and yield the samples of their own rank. Other callbacks draw random numbers in their
    hooks: this one should be the first. ExactResume has one of its own.

    Where the last batches of the ranks would be of several sizes, and code gathers the tensors of
    all ranks, which have to be of one size, a loader has Lightning's own DistributedSampler.

    Args:
        seed: Decides all draws; None for a different one in each run.
        names_in_code: Returns the names that the code of a trainer's model and callbacks mentions.
    """

    def __init__(
        self,
        seed: int | None = None,
        names_in_code: Callable[[Trainer], Collection[str]] = lambda trainer: (),
    ) -> None:
        self.seed = seed
        self.names_in_code = names_in_code
        self.turn: tuple[int, ...] = ()
        """Which of a trainer's trainings it is, if not the first one: it has other draws."""
        self.loaders: dict[str, list[Any]] = {}
        self.changed = ExitStack()
        """Gives back what a run of the trainer has changed in this process."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Agree on a seed with all ranks; make the loaders exact when they are prepared."""
        if stage != "fit":
            return
        self.seed = trainer.strategy.broadcast(
            torch.initial_seed() if self.seed is None else self.seed
        )
        self.loaders.clear()  # a Tuner's search may have left some, which a resumed run does not
        self.changed.enter_context(entropy_replaced(unseeded.bits))

        # Lightning names the last two arguments when it calls this.
        def prepare(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
            if mode == RunningStage.PREDICTING:
                return lightning_loaders.prepare_as_lightning(trainer, dataloader, shuffle, mode)
            if lightning_loaders.replaces_loader(trainer, dataloader):
                end_workers(dataloader)  # those of the loader that Lightning would make are new
                if self._needs_equal_batches(trainer, dataloader, mode):
                    loader = lightning_loaders.prepare_as_lightning(
                        trainer, dataloader, shuffle, mode
                    )
                    return self._exact(trainer, loader, mode, share=False)
            # data/deterministic.py shares batches out instead, and repeats no sample for it.
            loader = lightning_loaders.prepare_without_sampler(trainer, dataloader, shuffle, mode)
            return self._exact(trainer, loader, mode, lightning_loaders.shares_loaders(trainer))

        lightning_loaders.replace_preparation(trainer, prepare)

    def use_seed(self, seed: int) -> None:
        """Draw by another seed from now on: that of the run that is resumed."""
        self.seed = seed

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the process and the user's loaders as they were."""
        self.changed.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the process and the user's loaders as they were.

        Seed what the program draws next, such as the weights of another model: a run that has
        nothing left to train comes here with other draws than one that trains.
        """
        self.changed.close()
        if stage == "fit":
            seed_all("after", self.seed, *self.turn)

    def leave_loaders_to_lightning(self, trainer: Trainer) -> None:
        """Leave the preparation of the loaders to Lightning."""
        lightning_loaders.restore_preparation(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before training."""
        seed_all("fit", self.seed, data_rank(trainer), *self.turn)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before the first epoch."""
        seed_all("start", self.seed, data_rank(trainer), *self.turn)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before the first batch, from the training data too."""
        if isinstance(loader := combined_loader(trainer), TrainingLoaders):
            loader.epoch_begins(trainer.current_epoch)
        seed_all("epoch", self.seed, trainer.current_epoch, data_rank(trainer))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed what a training step draws, such as dropout."""
        # `batch_idx` differs in a step that draws batches.
        step = trainer.fit_loop.epoch_loop.batch_idx
        seed_all("step", self.seed, trainer.current_epoch, step, data_rank(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn after the last batch."""
        seed_all("end", self.seed, trainer.current_epoch, data_rank(trainer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed what is drawn before the first batch of a validation."""
        seed_all("validation", self.seed, trainer.global_step, data_rank(trainer))

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Seed what a validation step draws."""
        seed_all(
            "val", self.seed, trainer.global_step, dataloader_idx, batch_idx, data_rank(trainer)
        )

    def together(self, trainer: Trainer, loader: CombinedLoader, kind: str) -> None:
        """Make an epoch's loaders begin where training is, with a seed for each batch.

        Args:
            trainer: The trainer.
            loader: Lightning's combination of the loaders; its class is changed.
            kind: "train" for the training loaders, else the name of the stage that uses them.
        """
        loader.__class__ = of_class(
            TrainingLoaders if kind == "train" else ValidationLoaders, type(loader)
        )
        self.loaders[kind] = []
        if isinstance(loader, TrainingLoaders):
            loader.prepare((self.seed, kind), data_rank(trainer))
            self._tell_streams_apart(trainer, loader)
        elif isinstance(loader, ValidationLoaders):
            rank = data_rank(trainer)
            loader.seed_by(lambda: (self.seed, kind, trainer.global_step, rank))

    def _needs_equal_batches(self, trainer: Trainer, loader: Any, stage: RunningStage) -> bool:
        """Return whether code gathers batches whose sizes would differ between ranks; say so.

        Gathered tensors of different sizes end the ranks, or have them wait for ever.
        """
        if not shares_unequally(loader, data_ranks(trainer)):
            return False
        names = [name for name in self.names_in_code(trainer) if "all_gather" in name]
        # Objects are gathered whatever their size.
        gathers = sorted(name for name in names if not name.endswith("_object"))
        if gathers and trainer.is_global_zero:
            log.warning(
                f"{stage_name(stage)} data: the ranks take some samples twice, as Lightning's "
                f"DistributedSampler has it, so that their batches are of one size, which "
                f"{gathers[0]} expects"
            )
        return bool(gathers)

    def _tell_ranks_apart(self, trainer: Trainer, batches: Batches) -> None:
        """Have each rank draw by itself where the program's sampler shares the samples out.

        A sampler whose generators are alike on all ranks has one order, of which each takes its
        part; one with generators of its rank's has an order of its own.
        """
        if data_ranks(trainer) == 1 or batches.ranks > 1:
            return
        rank = data_rank(trainer)
        batches.of_rank = (rank,)
        states = [GENERATOR.mark(each) for each in batches.generators().values()]
        batches.order_rank = rank if states != trainer.strategy.broadcast(states) else 0

    def _tell_streams_apart(self, trainer: Trainer, loaders: TrainingLoaders) -> None:
        """Have generators that are each rank's own, such as seeded by it, draw other numbers."""
        streams = [each for each in loaders.resumables if isinstance(each, UnplacedLoader)]
        if not streams or data_ranks(trainer) == 1:
            return
        states = [
            {path: GENERATOR.mark(generator) for path, generator in each.generators().items()}
            for each in streams
        ]
        of_first_rank = trainer.strategy.broadcast(states)
        for stream, own, first in zip(streams, states, of_first_rank, strict=True):
            paths = {path for path, state in own.items() if state != first.get(path)}
            stream.of_rank = data_rank(trainer), paths

    def _exact(self, trainer: Trainer, loader: Any, stage: RunningStage, share: bool = True) -> Any:
        """Return the loader made exact; with `share`, the ranks share its batches."""
        kind = stage_name(stage)
        rank, ranks = data_rank(trainer), data_ranks(trainer)
        shares = {"rank": rank, "world_size": ranks} if share else {}
        loaders = self.loaders.setdefault(kind, [])
        number = [len(loaders)] if loaders and kind == "train" else []
        loaders.append(loader)
        loader_class = type(loader)
        loader = make_resumable(loader, self.seed, kind, *number, **shares)[0]
        if isinstance(loader, ReproducibleLoader):
            self._tell_ranks_apart(trainer, loader.batch_plan)
        if type(loader) is not loader_class:
            self.changed.callback(restore_loader, loader)
        return loader
