"""Lightning's strategy for sharded models, as one that resumes."""

import gc
import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.core.optimizer import _MockOptimizer
from pytorch_lightning.plugins import Precision
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.utilities import GradClipAlgorithmType
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from sagemaker_lightning.compat import model_parallel
from sagemaker_lightning.contract.errors import UserError


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


class Own(nn.Linear):
    """A class of the user's."""


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(Own(3, 2), nn.Linear(2, 1))


def sharded(mesh: DeviceMesh) -> Model:
    model = Model()
    fully_shard(model.network[0], mesh=mesh)
    fully_shard(model.network, mesh=mesh)
    model_parallel.settle_sharded_classes(model)
    return model


@pytest.mark.parametrize(
    ("sizes", "nodes", "ranks", "expected"),
    [
        ((2, 2), 1, 4, [2, 2]),
        ((4, "auto"), 1, 4, [4, 1]),
        (("auto", 2), 2, 8, [4, 2]),
        (("auto", "auto"), 1, 1, [1, 1]),
        (("auto", "auto"), 2, 8, [2, 4]),
    ],
)
def test_one_size_follows_from_the_other(sizes, nodes, ranks, expected):
    strategy = ModelParallelStrategy(*sizes)
    strategy.num_nodes = nodes
    line = model_parallel.settle_sizes(strategy, ranks)
    assert [strategy._data_parallel_size, strategy._tensor_parallel_size] == expected
    assert bool(line) == (sizes == ("auto", "auto") and ranks > 1)
    if line:
        assert "for FSDP2 alone, give data_parallel_size=8 and tensor_parallel_size=1" in line


@pytest.mark.parametrize("sizes", [(3, 1), (2, 1), ("auto", 3), (3, "auto"), (4, 2)])
def test_a_mesh_of_another_number_of_ranks_is_refused(sizes):
    with pytest.raises(UserError, match="expected two numbers whose product is 4, the number of"):
        model_parallel.settle_sizes(ModelParallelStrategy(*sizes), 4)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None])
def test_a_size_that_is_not_a_number_is_refused(size):
    says = r"^ModelParallelStrategy\(tensor_parallel_size=...\): found"
    with pytest.raises(UserError, match=says):
        model_parallel.settle_sizes(ModelParallelStrategy(2, size), 2)


def test_a_sharded_module_is_still_of_the_users_class(mesh: DeviceMesh):
    class_ = type(sharded(mesh).network[0])
    assert class_ is not Own and issubclass(class_, Own)
    assert (class_.__module__, class_.__qualname__) == (Own.__module__, Own.__qualname__)


class Tied(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(2, 3), nn.Linear(3, 2, bias=False))
        self.network[1].weight = self.network[0].weight


@pytest.mark.parametrize(
    "units",
    [
        lambda network: [network[0], network[1], network],
        lambda network: [network[1], network],
        lambda network: [network[0]],
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_that_are_split_are_refused(mesh: DeviceMesh, units, device):
    model = Tied() if device == "cpu" else LightningModule()  # made before, or in configure_model
    split = r"^configure_model\(\): found tied weights that are split \(network.0.weight and netw"
    with pytest.raises(UserError, match=split), model_parallel.checked_ties(model):
        with torch.device(device):
            model.network = Tied().network
        for unit in units(model.network):
            fully_shard(unit, mesh=mesh)


@pytest.mark.parametrize(
    "units",
    [
        lambda network: [network],
        lambda network: [[network[0], network[1]], network],
    ],
)
def test_tied_weights_may_be_sharded_together(mesh: DeviceMesh, units):
    model = Tied()
    with model_parallel.checked_ties(model):
        for unit in units(model.network):
            fully_shard(unit, mesh=mesh)
    assert model.network[0].weight is model.network[1].weight


def test_weights_may_be_untied_or_frozen(mesh: DeviceMesh):
    untied, frozen = Tied(), Tied()
    frozen.requires_grad_(False)
    with model_parallel.checked_ties(untied):
        untied.network[1].weight = nn.Parameter(untied.network[0].weight.detach().clone())
        fully_shard(untied.network[0], mesh=mesh)
    with model_parallel.checked_ties(frozen):
        fully_shard(frozen.network[0], mesh=mesh)


def test_weights_that_are_made_after_others_were_made_again_are_no_tied_ones(mesh: DeviceMesh):
    model = LightningModule()
    with model_parallel.checked_ties(model):
        first = nn.Linear(3, 3, bias=False)
        first.weight = nn.Parameter(torch.ones(3, 3))
        model.network = nn.Sequential(first, nn.Linear(3, 3, bias=False))
        fully_shard(model.network, mesh=mesh)


def test_no_whole_weight_is_kept_while_ties_are_watched(mesh: DeviceMesh):
    model = Tied()
    whole = weakref.ref(model.network[0].weight)
    with model_parallel.checked_ties(model):
        fully_shard(model.network, mesh=mesh)
        gc.collect()
        assert whole() is None


@pytest.mark.parametrize("name", model_parallel.KEEP_GRADIENTS)
def test_gradients_that_are_not_exchanged_are_refused(mesh: DeviceMesh, name):
    network = sharded(mesh).network
    getattr(network, name)(True)
    with pytest.raises(UserError, match=rf"^{name}\(False\): found gradients that the ranks do"):
        getattr(network, name)(False)


def test_whole_weights_are_loaded_into_parts(mesh: DeviceMesh):
    model, other = sharded(mesh), Model()
    model_parallel.load_whole(model, other.state_dict(), strict=True)
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert value.full_tensor().equal(other.state_dict()[name])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_what_is_written_while_weights_are_gathered_is_kept(mesh: DeviceMesh, caplog, precision):
    model = Model().requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=precision)
    fully_shard(model.network, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    strategy = ModelParallelStrategy(1, 1)
    model_parallel.make_resumable(strategy)
    strategy._lightning_module = model
    strategy.note_places()
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model.network(torch.ones(1, 3))
        after = strategy.lightning_module_state_dict()
        assert all(after[name].full_tensor().equal(value) for name, value in before.items())
        assert not caplog.messages
    for number in range(2):
        model.network(torch.ones(1, 3))
        model.network[1].weight.fill_(number)
        after = strategy.lightning_module_state_dict()
        assert after["network.1.weight"].full_tensor().tolist() == [[number] * 2]
        assert after["network.0.weight"].full_tensor().equal(before["network.0.weight"])
    (line,) = caplog.messages
    assert line.startswith("network.1.weight: something was written into the whole of it")


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Replicate(), Shard(0)]),
    ],
)
def test_a_ranks_own_part_of_a_gathered_weight(rank, sizes, placements):
    """It is the one that DTensors have, with uneven and empty ones."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", sizes)
        for shape in ((5, 6), (2, 3), (1, 1)):
            whole = torch.arange(math.prod(shape)).reshape(shape)
            spec = mesh, placements
            part = distribute_tensor(whole, *spec, src_data_rank=None).to_local()
            assert model_parallel.own_part(whole, *spec).equal(part)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.5), ("norm", 50.0), ("value", 0.3)])
def test_gradients_of_several_meshes_are_clipped_as_whole_ones(mesh, algorithm, value):
    """As with tensor parallelism, of which some layers have none; those without a mesh, too."""
    strategy = ModelParallelStrategy(1, 1)
    strategy.precision_plugin = Precision()
    model_parallel.make_resumable(strategy)
    other = init_device_mesh("cpu", (1, 1))
    whole = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    parts = [nn.Parameter(distribute_tensor(torch.zeros(3), each)) for each in (mesh, other)]
    parts += [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    for number, (weight, part) in enumerate(zip(whole[:3], parts[:3], strict=True)):
        weight.grad = torch.tensor([1.0, -2.0, 3.0]) / (number + 1)
        part.grad = weight.grad.clone()
        if isinstance(part, DTensor):
            part.grad = distribute_tensor(part.grad, part.device_mesh)
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]
    clip(whole, value)
    strategy.precision_plugin.clip_gradients(
        torch.optim.SGD(parts), value, GradClipAlgorithmType(algorithm)
    )
    for weight, part in zip(whole[:3], parts[:3], strict=True):
        gradient = part.grad.full_tensor() if isinstance(part, DTensor) else part.grad
        assert torch.allclose(gradient, weight.grad)
    assert parts[3].grad is None
    model_parallel.clip_grad_by_norm(Precision(), torch.optim.SGD(parts[3:]), 0.1)


def test_an_optimizer_without_a_state_has_none_to_share_out():
    """Lightning's stand-in, if `configure_optimizers` returns None, saves {}."""
    strategy = ModelParallelStrategy()
    model_parallel.make_resumable(strategy)
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.optimizers = [_MockOptimizer()]
    strategy.load_optimizer_state_dict({"optimizer_states": [{}]})
    assert strategy.optimizers[0].state_dict() == {}
