"""data/loaders/kinds.py: which class a loader gets."""

from types import SimpleNamespace

import pytest
import streams
from loader_epochs import LOADERS, Numbers, OfLitdatas, Shared, begin, of_nodes
from pytorch_lightning.trainer.states import RunningStage
from test_strange import KeepingWorkers
from torch.utils.data import DataLoader

from sagemaker_lightning.data.loaders.kinds import resumable
from sagemaker_lightning.data.loaders.one_pass import OnePass
from sagemaker_lightning.data.loaders.positioned import Positioned
from sagemaker_lightning.data.loaders.redrawn import Redrawn
from sagemaker_lightning.data.loaders.stateful import Stateful
from sagemaker_lightning.data.loaders.strange import Strange
from sagemaker_lightning.data.seeding import Seeding


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: DataLoader(range(8)), Positioned),
        (lambda: streams.StatefulDataLoader(streams.Points()), Positioned),
        (lambda: Shared(4), Positioned),
        (lambda: DataLoader(Numbers(8)), Redrawn),
        (streams.Steady, Redrawn),
        (lambda: range(4), Redrawn),
        (OfLitdatas, Redrawn),
        (lambda: streams.StatefulDataLoader(Numbers(8)), Stateful),
        (streams.Keeping, Stateful),
        (of_nodes, Stateful),
        (lambda: iter(range(4)), OnePass),
        (KeepingWorkers, Strange),
    ],
)
def test_the_kind_of_a_loader(make, kind):
    trainer = SimpleNamespace(global_rank=0, world_size=1)
    loader = Seeding(7)._exact(trainer, make(), RunningStage.TRAINING)
    assert type(resumable(loader, (7,), "")) is kind


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (LOADERS["a state"], Stateful),
        (LOADERS["a stateful loader without a state"], Redrawn),
        (streams.Keeping, Stateful),
        (streams.Forgetful, Redrawn),
    ],
)
def test_a_state_that_leads_elsewhere_makes_it_another_kind(make, kind):
    combined, fetcher = begin(make)
    combined.begin(fetcher, 0, 0)
    assert type(combined.resumables[0]) is kind
