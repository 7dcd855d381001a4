"""DTensors of the user's objects: the ranks write their parts of them."""

from collections.abc import Iterator

import pytest
import torch
from graph_records import Thing, state_of
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.state.digests import digest
from sagemaker_lightning.state.graph.state import GraphState, digests, names_in


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    distributed.destroy_process_group()


def test_a_dtensor_is_as_a_whole_in_no_record(mesh):
    """The ranks write their parts of it; where one has changed, all do."""
    average = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
    trained = Thing(average=average, later=None)
    state = state_of(trained)
    assert not state.touch_shared(state.encode(), [[], []])
    assert state.touch_shared(state.encode(), [[], ["model.average"]])
    trained.later = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
    record = state.encode()
    assert record["tensors"] == []
    assert record["shared"].keys() == {"model.average", "model.later"}
    with torch.no_grad():
        average += 2  # the record has a copy
    resumed = Thing(average=distribute_tensor(torch.ones(3), mesh, [Shard(0)]), later=None)
    of_resumed = state_of(resumed)
    of_resumed.restore(record)
    assert resumed.average.full_tensor().tolist() == [0, 0, 0]
    assert isinstance(resumed.later, nn.Parameter) and isinstance(resumed.later, DTensor)
    assert resumed.later.requires_grad and resumed.later.full_tensor().tolist() == [1, 1, 1]
    assert digests(of_resumed.encode()) == digests(record)
    assert digest({"average": resumed.average}) == digest({"average": average - 2})
    assert digest({"average": resumed.average}) != digest({"average": average})
    with torch.no_grad():
        resumed.later[0] = 5
    assert digests(of_resumed.encode()) != digests(record)


def test_a_dtensor_gets_what_was_a_whole_tensor_and_no_other_part(mesh):
    """As after a run with DDP; one that is shared out otherwise is refused."""
    trained = Thing(average=torch.zeros(3))
    state = state_of(trained)
    trained.average += 1
    resumed = Thing(average=distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    state_of(resumed).restore(state.encode())
    assert isinstance(resumed.average, DTensor)
    assert resumed.average.full_tensor().tolist() == [1, 1, 1]
    shared = Thing(average=distribute_tensor(torch.zeros(3), mesh, [Shard(0)]))
    state = state_of(shared)
    shared.average += 1
    with pytest.raises(UserError, match="a DTensor beside the model that was shared out in anoth"):
        state_of(Thing(average=torch.zeros(3))).restore(state.encode())


class Counting(nn.Linear):
    """Counts its calls, as users' modules do."""

    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)


def test_what_a_sharded_module_counts_is_state_and_what_shards_it_is_not(mesh):
    """A forward pass makes streams and more there, which each process has of its own."""
    model = nn.Sequential(Counting(2, 2), nn.Linear(2, 2))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    state = GraphState(lambda: {"model": model})
    state.mark()
    state.end_start()
    model(torch.ones(1, 2)).sum().backward()
    assert set(names_in(state.encode())) == {"model.0", "model.0.calls"}
    assert state.unsaved == []
