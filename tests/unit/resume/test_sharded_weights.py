"""What may be wrong with how a model is shared out: it is said when training begins."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from sagemaker_lightning.compat import model_parallel
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume import sharded_weights

RANKS = 4


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Be one rank of four, whose exchanges do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def first_rank() -> Iterator[None]:
    with as_rank(0):
        yield


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def trainer(data_parallel: int) -> SimpleNamespace:
    """Return a trainer of a model that is not shared out yet, with a mesh of all ranks."""
    strategy = ModelParallelStrategy()
    names = "data_parallel", "tensor_parallel"
    sizes = data_parallel, RANKS // data_parallel
    strategy._device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return SimpleNamespace(strategy=strategy, lightning_module=Model(), is_global_zero=True)


def own_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))


def by_tensor_parallelism(network: nn.Module, mesh: DeviceMesh) -> None:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(network, mesh["tensor_parallel"], plan)


def both(network: nn.Module, mesh: DeviceMesh) -> None:
    by_tensor_parallelism(network, mesh)
    fully_shard(network, mesh=mesh["data_parallel"])


def some_frozen(network: nn.Module, mesh: DeviceMesh) -> None:
    network[0].requires_grad_(False)
    fully_shard(network[1], mesh=mesh["data_parallel"])


@pytest.mark.usefixtures("first_rank")
@pytest.mark.parametrize(
    ("data_parallel", "share_out"),
    [
        (4, lambda network, mesh: fully_shard(network, mesh=mesh["data_parallel"])),
        (2, lambda network, mesh: fully_shard(network, mesh=mesh["data_parallel"])),
        (4, lambda network, mesh: fully_shard(network, mesh=own_mesh())),  # HSDP
        (2, lambda network, mesh: fully_shard(network, mesh=mesh)),
        (4, lambda network, mesh: fully_shard(network)),
        (1, by_tensor_parallelism),
        (1, both),
        (2, both),
        (4, some_frozen),
    ],
)
def test_weights_that_all_ranks_train_together_are_right(caplog, data_parallel, share_out):
    training = trainer(data_parallel)
    share_out(training.lightning_module.network, training.strategy.device_mesh)
    sharded_weights.check_meshes(training)
    assert not caplog.records


@pytest.mark.usefixtures("first_rank")
@pytest.mark.parametrize(
    "share_out",
    [
        lambda network, mesh: fully_shard(network, mesh=mesh["tensor_parallel"]),
        by_tensor_parallelism,
    ],
)
def test_weights_on_the_dimension_of_the_same_samples_alone_are_refused(share_out):
    training = trainer(data_parallel=2)
    share_out(training.lightning_module.network, training.strategy.device_mesh)
    says = (
        r"^configure_model\(\): found weights \(network.0.weight, network.0.bias, network.1.weight"
        r'\) that are shared out over device_mesh\["tensor_parallel"\] alone, whose ranks train on '
        "the same samples: nobody would add up the gradients of the 2 shares of the samples; call "
        r'fully_shard\(..., mesh=self.device_mesh\["data_parallel"\]\)'
    )
    with pytest.raises(UserError, match=says):
        sharded_weights.check_meshes(training)


@pytest.mark.usefixtures("first_rank")
def test_weights_that_groups_of_ranks_train_are_named(caplog):
    training = trainer(data_parallel=4)
    fully_shard(training.lightning_module.network, mesh=own_mesh()["parts"])
    sharded_weights.check_meshes(training)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "network.0.weight" in record.message
    assert "the ranks 0, 1 alone add up their gradients, of 4 ranks that train" in record.message


@pytest.mark.usefixtures("first_rank")
def test_ranks_that_repeat_the_work_of_others_are_named(caplog):
    training = trainer(data_parallel=1)
    mesh = training.strategy.device_mesh
    fully_shard(training.lightning_module.network, mesh=mesh["tensor_parallel"])
    sharded_weights.check_meshes(training)
    (record,) = caplog.records
    assert "whose 4 ranks train on the same samples: each does all of the work" in record.message
    assert "data_parallel_size=4 and tensor_parallel_size=1" in record.message


@pytest.mark.usefixtures("first_rank")
def test_weights_that_nothing_shards_are_refused():
    training = trainer(data_parallel=4)
    model = training.lightning_module
    fully_shard(model.network, mesh=training.strategy.device_mesh["data_parallel"])
    model.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    sharded_weights.check_meshes(training)
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match=r"found weights that nothing shards \(scale\), which"):
        sharded_weights.check_meshes(training)


@pytest.mark.usefixtures("first_rank")
def test_a_training_on_a_mesh_of_one_share_may_have_whole_weights():
    training = trainer(data_parallel=1)
    sharded_weights.check_meshes(training)


@pytest.mark.usefixtures("first_rank")
@pytest.mark.parametrize("share_out", [both, by_tensor_parallelism, some_frozen])
def test_an_optimizer_made_before_the_model_was_shared_out_is_refused(share_out):
    training = trainer(data_parallel=2)
    network = training.lightning_module.network
    early = torch.optim.Adam(network.parameters())
    with model_parallel.checked_ties(training.lightning_module) as replaced:
        share_out(network, training.strategy.device_mesh)
    training.strategy.replaced_weights = replaced
    own = torch.ones(1, requires_grad=True)  # it is in no module
    training.optimizers = [torch.optim.SGD([*network.parameters(), own])]
    sharded_weights.check_optimizers(training)
    training.optimizers.append(early)
    says = (
        r"^configure_optimizers\(\): found Adam, which was made before fully_shard\(\) or "
        r"parallelize_module\(\) has put others in the places of its weights \(network\."
    )
    with pytest.raises(UserError, match=says):
        sharded_weights.check_optimizers(training)


@pytest.mark.usefixtures("first_rank")
def test_an_optimizer_of_a_model_that_gets_its_memory_later_is_right():
    """As Lightning gives it to a model that is made on the meta device."""
    training = trainer(data_parallel=4)
    model = training.lightning_module
    with model_parallel.checked_ties(model) as replaced:
        with torch.device("meta"):
            model.network = Model().network
        fully_shard(model.network, mesh=training.strategy.device_mesh["data_parallel"])
        training.optimizers = [torch.optim.Adam(model.parameters())]
    model.to_empty(device="cpu")
    training.strategy.replaced_weights = replaced
    sharded_weights.check_optimizers(training)
    assert training.optimizers[0].param_groups[0]["params"] == list(model.parameters())


@pytest.mark.usefixtures("first_rank")
def test_a_model_that_is_not_shared_out_may_have_optimizers_of_other_tensors():
    own = torch.ones(1, requires_grad=True)
    training = SimpleNamespace(strategy=None, optimizers=[torch.optim.SGD([own])])
    sharded_weights.check_optimizers(training)


ONE = (0, 0), (2, 4)
"""Where a part of a weight begins, and its shape."""
OTHER = (2, 0), (2, 4)


@pytest.mark.parametrize(
    ("of_ranks", "shares"),
    [
        ([([0, 1], ONE, 1), ([0, 1], OTHER, 2)], [[0], [1]]),
        ([([0, 1], ONE, 1), ([0, 1], ONE, 1)], [[0], [1]]),  # replicas
        ([([0], ONE, 1), ([1], ONE, 2)], [[0], [1]]),  # each trains a model of its own
        ([([], None, 1), ([], None, 1)], [[0, 1]]),  # whole weights
    ],
)
def test_ranks_may_have_what_no_other_rank_has(caplog, of_ranks, shares):
    sharded_weights.compare_parts([{"weight": part} for part in of_ranks], shares)
    assert not caplog.records


@pytest.mark.parametrize("place", [([0, 1], ONE), ([], None)])
def test_ranks_that_have_other_values_of_the_same_weights_are_refused(place):
    says = r"^configure_model\(\): found other values of b on rank 1 than on rank 0, which have the"
    answers = [{"a": (*place, 7), "b": (*place, number)} for number in (1, 2)]
    with pytest.raises(UserError, match=says):
        sharded_weights.compare_parts(answers, [[0], [1]])


@pytest.mark.usefixtures("first_rank")
def test_ranks_of_the_same_samples_that_have_other_values_are_named(caplog):
    """With tensor parallelism, of weights that are shared out over the other dimension alone."""
    places = [[0, 2], [1, 3], [0, 2], [1, 3]]
    chunks = [ONE, ONE, OTHER, OTHER]
    numbers = [1, 2, 3, 3]
    answers = [{"weight": each} for each in zip(places, chunks, numbers, strict=True)]
    sharded_weights.compare_parts(answers, [[0, 1], [2, 3]])
    (record,) = caplog.records
    assert "other values of weight on rank 1 than on rank 0, which train on" in record.message


@pytest.mark.usefixtures("first_rank")
@pytest.mark.parametrize(
    ("share_out", "ranks", "chunk"),
    [
        (lambda network: fully_shard(network), [0, 1, 2, 3], ((0, 0), (1, 4))),
        (lambda network: fully_shard(network, mesh=own_mesh()), [0, 1, 2, 3], ONE),  # HSDP
        (lambda network: fully_shard(network, mesh=own_mesh()["parts"]), [0, 1], ONE),
        (lambda network: None, [], None),
    ],
)
def test_which_part_of_a_weight_a_rank_has(share_out, ranks, chunk):
    model = Model()
    share_out(model.network)
    found = sharded_weights.parts_of(model)
    assert found["network.0.weight"][:2] == (ranks, chunk)
    torch.nn.init.zeros_(model.network[0].weight)
    now = sharded_weights.parts_of(model)
    assert {name for name in found if found[name] != now[name]} == {"network.0.weight"}


@pytest.mark.usefixtures("first_rank")
def test_only_the_ranks_of_a_sharded_model_are_compared():
    asked = []
    training = trainer(data_parallel=4)
    sharded_weights.check_replicas(training, lambda own: asked.append(own) or [own])
    training.strategy = None
    sharded_weights.check_replicas(training, lambda own: asked.append(own) or [own])
    assert [sorted(each)[0] for each in asked] == ["network.0.bias"]
