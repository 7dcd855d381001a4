"""A run that trains nothing, and the parts of a checkpoint that have its user's objects."""

import io
import itertools
from types import SimpleNamespace

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.utils.data import Dataset
from untrained import resumed, run_of

from sagemaker_lightning.resume.parts.data_identity import DataIdentity, Structure
from sagemaker_lightning.resume.parts.generators import Generators
from sagemaker_lightning.resume.parts.loader_positions import LoaderPositions
from sagemaker_lightning.resume.parts.modes import Modes
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.parts.stateful_objects import StatefulObjects
from sagemaker_lightning.resume.parts.trainer_settings import TrainerSettings
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.resume_point import ResumePoint


class Model(LightningModule):
    """Has a layer, and what it is given as attributes."""

    def __init__(self, **values) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
        for name, value in values.items():
            setattr(self, name, value)


class Sharing(Model):
    """Shares with all models of its class what is not a state of one."""

    signs_of_all = itertools.count()
    scaler_of_all = torch.amp.GradScaler("cpu")


class Holding(Callback):
    def __init__(self, **values) -> None:
        vars(self).update(values)


class Points(Dataset):
    """Points, and what a user has made of them."""

    def __init__(self, **values) -> None:
        vars(self).update(values)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(index)


def trainer_of(model=None, *callbacks, train=None, val=None, optimizers=(), **options) -> Trainer:
    settings = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(**settings | options, callbacks=list(callbacks))
    model = model or Model()
    trainer.strategy.connect(model)
    model.trainer = trainer
    trainer.strategy.optimizers = list(optimizers)
    for loop, loader in ((trainer.fit_loop, train), (trainer.fit_loop.epoch_loop.val_loop, val)):
        loop._combined_loader = None if loader is None else CombinedLoader(loader, "sequential")
    return trainer


class UserState:
    """The parts of a checkpoint that have a user's objects, of a run that trains nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.run = run_of(trainer)
        self.objects = self.run.part(UserObjects)
        self.state = self.objects.graph

    def encode_changes(self, point: ResumePoint | None = None) -> dict:
        saved = {
            part.key: self.run.part(part).save(point, None)
            for part in (UserObjects, Generators, StatefulObjects, TrainerSettings, Modes)
        }
        saved["structure"] = self.run.part(Structure).save(point, None)
        saved["data_identity"] = self.run.part(DataIdentity).save(point, None)
        if point:
            saved["loader_positions"] = self.run.part(LoaderPositions).save(point, None)
        return saved

    def restore(self, saved: dict, only_plain: bool = False, same_ranks: bool = True) -> None:
        """Restore it as after the hooks that begin training, or as before them."""
        resumed(self.run, world_size=1 if same_ranks else 2, **saved)
        parts = UserObjects, Generators, StatefulObjects, TrainerSettings, Modes
        moment = Moment.HOOKS if only_plain else Moment.TRAINING
        for part in map(self.run.part, parts):
            if moment in part.moments:
                part.restore(saved[part.key], moment)


def state_of(*arguments, **values) -> UserState:
    """Return the state of the objects of a trainer, which has just begun."""
    state = UserState(trainer_of(*arguments, **values))
    state.run.mark_start()
    return state


def in_training(state: UserState, **states) -> None:
    """Have the trainer's loaders say what their states are."""
    state.trainer.fit_loop._combined_loader = SimpleNamespace(
        states=lambda fetcher, within: states | {"within": within},
        iterables=None,
    )


def own_hook(module, inputs):
    """Change nothing."""


class Row:
    """A thing that cannot be saved."""

    def __init__(self) -> None:
        self.file = io.TextIOWrapper(io.BytesIO())


UNSAVED = (
    ", which cannot be saved: a resumed run starts with the program's initial value; keep "
    "numbers, text, "
)


def told(capsys, state: UserState) -> list[str]:
    """Return the warnings when the state is saved, which is all that is printed."""
    state.encode_changes()
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("warning: ") for line in lines)
    return [line.removeprefix("warning: ") for line in lines]
