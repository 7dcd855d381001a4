"""The shards of a checkpoint: what ranks save, and what others read of it."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sagemaker_lightning.compat import model_parallel
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_file, shards
from sagemaker_lightning.resume.files.checkpoint_file import ENTRIES_KEY

STEP, NUMBER = 7, 1234
WHOLE = torch.arange(20.0).view(5, 4)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    distributed.destroy_process_group()


def write(folder: Path, parts: list[torch.Tensor], chunks: list) -> dict:
    """Write a checkpoint whose tensor "weight" has these parts; return its entries."""
    checksums = [
        checkpoint_file.write(
            shards.path_of(folder, STEP, NUMBER, rank, len(parts)),
            {ENTRIES_KEY: {"rank": rank}, "tensors": {"weight": part}},
            STEP,
            NUMBER,
        ).hex()
        for rank, part in enumerate(parts)
    ]
    form = {"shape": [5, 4], "dtype": "float32", "layout": [], "chunks": chunks}
    entries = {
        "step": STEP,
        "number": NUMBER,
        "world_size": len(parts),
        "mesh": [len(parts), 1],
        "shards": {"tensors": {"weight": form}, "checksums": checksums},
    }
    checkpoint_file.write(own_file(folder), {ENTRIES_KEY: entries}, STEP, NUMBER)
    return entries


def own_file(folder: Path) -> Path:
    return folder / f"step-{STEP:09d}.ckpt"


def rows(folder: Path) -> dict:
    """Write a checkpoint whose tensor three ranks share by rows: 2, 2 and 1."""
    parts = [WHOLE[:2], WHOLE[2:4], WHOLE[4:]]
    return write(folder, parts, [[[0, 0], [2, 4]], [[2, 0], [2, 4]], [[4, 0], [1, 4]]])


def read(folder: Path, entries: dict, mesh=None, like=None, rank: int = 0) -> torch.Tensor:
    reader = shards.ShardReader(folder, entries, rank, mesh, lambda path: like)
    return reader.resolve({"state_dict": {"weight": {shards.MARK: "weight"}}})["state_dict"][
        "weight"
    ]


def problem(folder: Path, own_ranks=range(3), mesh=(3, 1)) -> str:
    return shards.problem(own_file(folder), mesh=mesh, ranks=3, own_ranks=own_ranks)


def test_one_rank_reads_what_three_have_shared_by_rows(tmp_path: Path):
    assert read(tmp_path, rows(tmp_path)).equal(WHOLE)
    assert problem(tmp_path) == ""


def test_one_rank_reads_what_four_have_shared_by_rows_and_columns(tmp_path: Path):
    places = [(0, 0), (0, 2), (3, 0), (3, 2)]
    sizes = [(3, 2), (3, 2), (2, 2), (2, 2)]
    parts = [
        WHOLE[row : row + height, column : column + width]
        for (row, column), (height, width) in zip(places, sizes, strict=True)
    ]
    chunks = [[list(at), list(size)] for at, size in zip(places, sizes, strict=True)]
    assert read(tmp_path, write(tmp_path, parts, chunks)).equal(WHOLE)


def test_a_mark_stands_for_a_tensor_once(tmp_path: Path):
    """A few bytes would make all of the tensor once more."""
    reader = shards.ShardReader(tmp_path, rows(tmp_path), 0, None, lambda path: None)
    with pytest.raises(ValueError, match="weight"):
        reader.resolve({"state_dict": [{shards.MARK: "weight"}] * 2})


def test_one_of_equal_parts_is_enough(tmp_path: Path):
    entries = write(tmp_path, [WHOLE, WHOLE], [[[0, 0], [5, 4]]] * 2)
    shards.path_of(tmp_path, STEP, NUMBER, 1, 2).unlink()
    assert read(tmp_path, entries).equal(WHOLE)


def test_a_rank_without_a_part(tmp_path: Path):
    entries = write(tmp_path, [WHOLE, WHOLE[:0]], [[[0, 0], [5, 4]], [[5, 0], [0, 4]]])
    assert read(tmp_path, entries).equal(WHOLE)


def test_a_tensor_is_shared_out_as_the_models(tmp_path: Path, mesh: DeviceMesh):
    like = distribute_tensor(torch.zeros(5, 4), mesh["data_parallel"], [Shard(0)])
    found = read(tmp_path, rows(tmp_path), mesh, like)
    assert isinstance(found, DTensor) and found.placements == like.placements
    assert found.full_tensor().equal(WHOLE)
    # Nothing of the model's has another shape.
    with pytest.raises(UserError, match="holds weight, which was shared out in a way that this"):
        read(tmp_path, rows(tmp_path), mesh, torch.zeros(3))


def test_a_whole_tensor_of_a_ddp_run_is_shared_out(tmp_path: Path, mesh: DeviceMesh):
    like = distribute_tensor(torch.zeros(5, 4), mesh["data_parallel"], [Shard(0)])
    reader = shards.ShardReader(tmp_path, {}, 0, mesh, lambda path: like)
    found = reader.resolve({"state_dict": {"weight": WHOLE, "step": torch.tensor(1.0)}})
    assert isinstance(found["state_dict"]["weight"], DTensor)
    assert found["state_dict"]["weight"].full_tensor().equal(WHOLE)
    assert found["state_dict"]["step"].equal(torch.tensor(1.0))


def test_what_is_saved_is_read_again(tmp_path: Path, mesh: DeviceMesh):
    tensor = distribute_tensor(WHOLE.clone(), mesh, [Shard(0), Replicate()])
    shared = shards.SharedOut()
    saved = shared.take({"state_dict": {"weight": tensor, "count": 3}, "list": [tensor * 2]})
    assert saved["state_dict"] == {"weight": {shards.MARK: "state_dict/weight"}, "count": 3}
    tensor.zero_()  # training continues while it is written
    writer = shards.ShardWriter("algo-1")
    checksums = writer.write(tmp_path, STEP, NUMBER, shared.parts)
    description = shared.described(lambda value: [value]) | {"checksums": checksums}
    entries = {"step": STEP, "number": NUMBER, "world_size": 1, "shards": description}
    found = shards.ShardReader(tmp_path, entries, 0, mesh, lambda path: None).resolve(saved)
    weight = found["state_dict"]["weight"]
    assert weight.full_tensor().equal(WHOLE) and weight.placements == tensor.placements
    assert found["list"][0].full_tensor().equal(WHOLE * 2) and found["state_dict"]["count"] == 3


def test_partial_sums_are_refused(mesh: DeviceMesh):
    sums = DTensor.from_local(WHOLE, mesh["data_parallel"], [Partial()])
    with pytest.raises(UserError, match=r"metric is a DTensor of partial sums; keep there what"):
        shards.SharedOut().take({"metric": sums})


def test_ranks_that_share_out_other_tensors_are_refused(mesh: DeviceMesh):
    tensor = distribute_tensor(WHOLE.clone(), mesh["data_parallel"], [Shard(0)])
    shared = shards.SharedOut()
    shared.take({"average": tensor})
    with pytest.raises(UserError, match="average is a DTensor on rank 0 or rank 1 only"):
        shared.described(lambda forms: [forms, {}])


def test_a_tensor_of_some_ranks_is_read_where_all_of_it_is_there(tmp_path: Path, mesh: DeviceMesh):
    """What a rank saves for itself may lack a tensor that other ranks have."""
    shared = shards.SharedOut()
    average = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)] * 2)
    shared.take({"ranks": {"average": average}, "parts": {"average": average}})
    for of_ranks in ([{}, shared.forms], [shared.forms, {}]):
        forms = shared.described(lambda forms, of_ranks=of_ranks: of_ranks)["tensors"]
        chunks = [[[0, 0], [5, 4]] if has else None for has in of_ranks]
        assert forms["ranks/average"]["chunks"] == forms["parts/average"]["chunks"] == chunks
    entries = write(tmp_path, [WHOLE[:0], WHOLE], [None, [[0, 0], [5, 4]]])
    assert read(tmp_path, entries).equal(WHOLE)
    entries = write(tmp_path, [WHOLE[:0], WHOLE[2:]], [None, [[2, 0], [3, 4]]])
    with pytest.raises(UserError, match="holds weight, a DTensor of which some ranks had no part"):
        read(tmp_path, entries)


def test_a_tensor_that_another_rank_has_in_another_form_is_refused(mesh: DeviceMesh):
    shared, other = shards.SharedOut(), shards.SharedOut()
    shared.take({"ranks": {"average": distribute_tensor(WHOLE.clone(), mesh, [Shard(0)] * 2)}})
    other.take({"ranks": {"average": distribute_tensor(WHOLE[1:].clone(), mesh, [Shard(0)] * 2)}})
    with pytest.raises(UserError, match="ranks/average is a DTensor on .* only, or another one"):
        shared.described(lambda forms: [forms, other.forms])


def test_what_was_shared_out_as_a_weight_is_shared_out_as_it_is_now(tmp_path: Path, mesh):
    """Such as an average of it: how the ranks of the checkpoint shared it is of no matter."""
    entries = rows(tmp_path)
    form = entries["shards"]["tensors"].pop("weight")
    # Three ranks shared it out over a dimension that this run's mesh has not got.
    form["layout"] = [["nodes", "S(0)"]]
    entries["shards"]["tensors"] = {"state_dict/own": form, "weight": form}
    like = distribute_tensor(torch.zeros(5, 4), mesh["data_parallel"], [Shard(0)])

    def liked(path):
        return like if path == ("state_dict", "own") else None

    reader = shards.ShardReader(tmp_path, entries, 0, mesh, liked)
    found = reader.resolve([{shards.MARK: "weight"}], "ranks")[0]
    assert found.device_mesh == like.device_mesh and found.placements == like.placements
    assert found.full_tensor().equal(WHOLE)


@pytest.mark.parametrize("name", ["average['own']", "average['own'].square", "average[1]"])
def test_an_average_is_shared_out_as_the_weight_of_its_name(tmp_path: Path, mesh, name):
    """Weights of one form may be split by rows and by columns in another mesh."""
    entries = rows(tmp_path)
    form = entries["shards"]["tensors"].pop("weight")
    path = f"ranks/{name}"
    names = "state_dict/other", "state_dict/own", path
    entries["shards"]["tensors"] = dict.fromkeys(names, form)
    weights = {
        ("state_dict", each): distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0), Shard(n)])
        for n, each in enumerate(("other", "own"))
    }
    reader = shards.ShardReader(tmp_path, entries, 0, mesh, weights.get)
    if name == "average['own']":
        assert reader._weight_like(path, form) is weights["state_dict", "own"]
        return
    with pytest.raises(UserError, match="may be of any of the weights other, own, which this run"):
        reader._weight_like(path, form)


def test_all_ranks_hear_of_a_full_disk(tmp_path: Path, mesh: DeviceMesh, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_file, "write", fail)
    with pytest.raises(OSError, match="on algo-2: No space left on device"):
        shards.ShardWriter("algo-2").write(tmp_path, STEP, NUMBER, {})


# Damage, and forgery ------------------------------------------------------------------------------


def test_a_missing_shard(tmp_path: Path):
    rows(tmp_path)
    path = shards.path_of(tmp_path, STEP, NUMBER, 1, 3)
    path.unlink()
    assert problem(tmp_path) == f"needs its shard {path.name}, which is missing"
    # With the same ranks, a host needs the shards of its own ranks; with others, all.
    assert problem(tmp_path, own_ranks=[0]) == problem(tmp_path, own_ranks=[2]) == ""
    assert "is missing" in problem(tmp_path, own_ranks=[0], mesh=(1, 3))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda content: content[:-100], "is cut off, or not a checkpoint of this program"),
        (lambda content: content[:-1], "is cut off, or not a checkpoint of this program"),
        (
            lambda content: content[:300] + bytes([content[300] ^ 1]) + content[301:],
            "is damaged: its checksum does not match",
        ),
        (lambda content: b"", "is cut off, or not a checkpoint of this program"),
    ],
)
def test_a_damaged_shard(tmp_path: Path, damage, expected):
    rows(tmp_path)
    path = shards.path_of(tmp_path, STEP, NUMBER, 2, 3)
    path.write_bytes(damage(path.read_bytes()))
    assert problem(tmp_path) == f"needs its shard {path.name}, which {expected}"


def test_a_shard_of_another_run(tmp_path: Path):
    rows(tmp_path)
    path = shards.path_of(tmp_path, STEP, NUMBER, 0, 3)
    content = {ENTRIES_KEY: {"rank": 0}, "tensors": {"weight": WHOLE[:2] + 1}}
    checkpoint_file.write(path, content, STEP, NUMBER)
    assert problem(tmp_path).endswith("is another one than was saved with it")


class Malicious:
    """Makes a folder if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_shard_cannot_run_code(tmp_path: Path):
    entries = rows(tmp_path)
    path = shards.path_of(tmp_path, STEP, NUMBER, 0, 3)
    proof = tmp_path / "proof"
    content = {ENTRIES_KEY: {"rank": 0}, "tensors": {"weight": Malicious(proof)}}
    checksum = checkpoint_file.write(path, content, STEP, NUMBER).hex()
    entries["shards"]["checksums"][0] = checksum
    checkpoint_file.write(own_file(tmp_path), {ENTRIES_KEY: entries}, STEP, NUMBER)
    assert "which cannot be read (there is a posix.mkdir in it" in problem(tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        read(tmp_path, entries)
    assert not proof.exists()


def test_lightnings_folder_of_shards_is_refused_and_cannot_run_code(tmp_path: Path):
    proof = tmp_path / "proof"
    (tmp_path / "best.ckpt").mkdir()
    for name in (".metadata", "meta.pt", "__0_0.distcp"):
        (tmp_path / "best.ckpt" / name).write_bytes(pickle.dumps(Malicious(proof)))
    strategy = ModelParallelStrategy(1, 1)
    model_parallel.make_resumable(strategy)
    with pytest.raises(UserError, match=r"ckpt_path=.*best.ckpt: found a folder, .* may run code"):
        strategy.load_checkpoint(tmp_path / "best.ckpt", weights_only=False)
    assert not proof.exists()


@pytest.mark.parametrize(
    "forged",
    [
        {"chunks": [[[0, 0], [2, 4]], [[2, 0], [2, 4]], [[2, 0], [1, 4]]]},  # not all of it
        {"chunks": [[[0, 0], [5, 4]], [[5, 0], [0, 4]], [[5, 0], [0, 4]]]},  # not what there is
        {"chunks": [[[0, 0], [2, 4]]]},
        {"chunks": [[[0, 0], [2, 4]], [[2], [2]], [[4, 0], [1, 4]]]},
        {"chunks": 3},
        {"shape": [10**7, 10**7]},
        {"shape": [-5, -4]},
        {"shape": "54"},
        {"dtype": "float64"},
        {"dtype": "save"},
        {"dtype": "nn.Module"},
    ],
    ids=str,
)
def test_a_forged_description_is_refused(tmp_path: Path, forged):
    entries = rows(tmp_path)
    entries["shards"]["tensors"]["weight"] |= forged
    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)):
        read(tmp_path, entries)


@pytest.mark.parametrize("forged", [{"checksums": ["../../etc/passwd"] * 3}, {"checksums": []}, {}])
def test_forged_checksums_are_refused(tmp_path: Path, forged):
    entries = rows(tmp_path)
    entries["shards"] = {"tensors": {}} | forged
    checkpoint_file.write(own_file(tmp_path), {ENTRIES_KEY: entries}, STEP, NUMBER)
    assert problem(tmp_path).startswith("is forged: what it says of its shards")


@pytest.mark.parametrize("forged", [{"number": 10**400}, {"step": STEP + 1}], ids=str)
def test_forged_numbers_are_refused_before_names_are_made_of_them(tmp_path: Path, forged):
    entries = rows(tmp_path) | forged
    checkpoint_file.write(own_file(tmp_path), {ENTRIES_KEY: entries}, STEP, NUMBER)
    assert problem(tmp_path).startswith("is forged: what it says of its shards")


def test_a_shard_is_found_by_its_name_alone(tmp_path: Path):
    # No part of the path is a text of the checkpoint's.
    entries = rows(tmp_path)
    entries["number"] = "/../../elsewhere/1234"
    with pytest.raises(ValueError, match="format code 'd'"):
        read(tmp_path, entries)


# The files in the folder --------------------------------------------------------------------------


def test_the_shards_of_a_step_are_removed(tmp_path: Path):
    rows(tmp_path)
    older = shards.path_of(tmp_path, STEP, NUMBER - 1, 0, 3)
    other = shards.path_of(tmp_path, STEP + 1, NUMBER, 0, 3)
    for path in (older, other):
        path.touch()
    shards.remove(tmp_path, STEP, before=NUMBER)
    assert not older.exists() and len(shards.paths_in(tmp_path, STEP)) == 3
    shards.remove(tmp_path, STEP)
    assert not shards.paths_in(tmp_path, STEP) and other.exists()


def test_shards_without_a_checkpoint_are_removed(tmp_path: Path):
    rows(tmp_path)
    orphan = shards.path_of(tmp_path, STEP + 1, NUMBER, 0, 3)
    foreign = tmp_path / "step-of-mine.shard"
    for path in (orphan, foreign):
        path.touch()
    shards.remove_orphans(tmp_path, [STEP])
    assert not orphan.exists() and foreign.exists()
    assert len(shards.paths_in(tmp_path, STEP)) == 3
