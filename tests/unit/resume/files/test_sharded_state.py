"""A state that ranks share, saved and loaded without a Trainer."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import torch
from pages import FENCE, PAGES
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_file, sharded_state
from sagemaker_lightning.resume.files.checkpoint_file import ENTRIES_KEY

WHOLE = torch.arange(20.0).view(5, 4)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    distributed.destroy_process_group()


def test_the_lines_of_the_page(tmp_path: Path, mesh: DeviceMesh, monkeypatch):
    (lines,) = (t for _, t in FENCE.findall(PAGES["docs/sharded.md"]) if "sharded_state.save" in t)
    model = nn.Linear(4, 3)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    monkeypatch.chdir(tmp_path)
    names = {"model": model, "optimizer": optimizer}
    saving, loading = re.fullmatch("(.*save.*?\n)(.*)", lines, re.DOTALL).groups()
    exec(saving, names)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    exec(loading, names)
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor) and value.full_tensor().equal(before[name])
    assert names["state"]["step"] == 120
    moments = names["state"]["optimizer"]["state"][0]["exp_avg"]
    assert moments.equal(optimizer.state_dict()["state"][0]["exp_avg"].full_tensor())


def test_no_rank_continues_before_the_manifest_is_there(tmp_path: Path, mesh, monkeypatch):
    found = []
    monkeypatch.setattr(distributed, "barrier", lambda: found.append([*tmp_path.glob("*.ckpt")]))
    path = sharded_state.save(tmp_path, {"weight": torch.ones(2)}, 5)
    assert found[-1] == [path]


def saved_by_a_rank(folder: Path) -> None:
    """Save a tensor of which each of three ranks has rows: 2, 2 and 1."""
    distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("data",))
    sharded_state.save(folder, {"weight": distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])}, 5)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_one_process_loads_what_three_ranks_have_saved(tmp_path: Path):
    ended = ranks.run(saved_by_a_rank, tmp_path / "saved", nodes=(3,), folder=tmp_path)
    assert not any(each.error for each in ended), ended[0].output
    assert len(list((tmp_path / "saved").iterdir())) == 4
    path = tmp_path / "saved/step-000000005.ckpt"
    assert sharded_state.load(path)["weight"].equal(WHOLE)
    shard = sorted((tmp_path / "saved").glob("*.shard"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    with pytest.raises(UserError, match=rf"its shard {shard.name}, which is damaged: its checksum"):
        sharded_state.load(path)


def test_a_manifest_that_is_missing_or_damaged_is_a_line(tmp_path: Path):
    path = tmp_path / "step-000000005.ckpt"
    with pytest.raises(UserError, match=r"step-000000005.ckpt is missing; expected a manifest"):
        sharded_state.load(path)
    path.write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match=r"step-000000005.ckpt is cut off, or not a checkpoint of"):
        sharded_state.load(path)


def test_a_manifest_is_not_larger_than_its_file(tmp_path: Path):
    """It would take for ever to look for tensors in such lists."""
    lists: list = []
    for _ in range(60):
        lists = [lists, lists]
    path = tmp_path / "step-000000005.ckpt"
    entries = {"step": 5, "number": 2, "world_size": 1, "mesh": []}
    checkpoint_file.write(path, {"state": lists, ENTRIES_KEY: entries}, 5, 2)
    with pytest.raises(UserError, match=r"step-000000005.ckpt is forged: it is small, and what"):
        sharded_state.load(path)
