"""Sharded models (FSDP2, tensor parallelism), interrupted: the same bits, and any ranks after."""

import ast
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import sharded
import sharded_soak
import torch
from safetensors.torch import load_file

from sagemaker_lightning.cli import safetensors_files
from sagemaker_lightning.resume.files import shards

pytestmark = pytest.mark.slow


def trained(folder: Path, *arguments, mesh=(2, 1), ranks_of_nodes=None, **options):
    """Train on all ranks of a mesh, in folder/checkpoints."""
    nodes = ranks_of_nodes or (mesh[0] * mesh[1],)
    checkpoints = options.pop("checkpoints", folder / "checkpoints")
    kind, *rest = arguments or ("",)
    return ranks.run(
        sharded.train, checkpoints, kind, mesh, *rest, nodes=nodes, folder=folder, **options
    )


def interrupt(folder: Path, kind: str, mesh, interruptions, **options) -> list[ranks.Ended]:
    """Train with interruptions, and to the end; return how the ranks ended."""
    for interruption in interruptions:
        if interruption.startswith("kill"):
            with pytest.raises(EOFError):  # the last rank is gone; then the others are killed
                trained(folder, kind, interruption, mesh=mesh, **options)
        else:
            ended = trained(folder, kind, interruption, mesh=mesh, **options)
            assert {each.error for each in ended} == {"Interrupted: 143"}, ended[0].output
    ended = trained(folder, kind, mesh=mesh, **options)
    assert not any(each.error for each in ended), ended[0].output
    assert "warning: resumed" not in ended[0].output
    return ended


# Two hosts, each with a folder of its own, as in a job without S3.
TWO_HOSTS = {"mesh": (2, 1), "ranks_of_nodes": (1, 1), "checkpoints": Path("checkpoints")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, list[sharded.Trained]]:
    """Two hosts that nothing interrupts: their folder, and what each rank has at the end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, [each.value for each in trained(folder, **TWO_HOSTS)]


# Ranks stop a batch after the signal, and an epoch has 8 batches: once exactly at its edge. "Meta"
# is killed in the first epoch.
AT_EDGE = ("stop at 0:6", "kill at 1:3")
TWICE = ("stop at 0:3", "kill at 1:3")


@pytest.mark.parametrize(
    ("kind", "mesh", "interruptions"),
    [
        ("", (3, 1), AT_EDGE),  # three ranks have uneven shards, and tied weights
        pytest.param("", (2, 2), ("stop at 1:2",), marks=pytest.mark.thorough),
        pytest.param(
            "accumulated",
            (2, 1),
            ("stop at 0:1", "kill at val 0:1", "stop at 1:2"),
            marks=pytest.mark.thorough,
        ),
        ("meta", (2, 1), ("kill at 0:3", "stop at end 0")),
        pytest.param("two optimizers", (2, 1), TWICE, marks=pytest.mark.thorough),
        pytest.param("buffers", (2, 1), TWICE, marks=pytest.mark.thorough),
        ("clipped", (2, 2), ("stop at 1:2",)),
        pytest.param("clipped", (2, 1), TWICE, marks=pytest.mark.thorough),
        pytest.param("bf16", (2, 1), TWICE, marks=pytest.mark.thorough),
        pytest.param("mixed", (3, 1), TWICE, marks=pytest.mark.thorough),
        pytest.param("recomputed", (2, 1), TWICE, marks=pytest.mark.thorough),
        pytest.param("frozen", (3, 1), TWICE, marks=pytest.mark.thorough),
        pytest.param("averaged", (3, 1), TWICE, marks=pytest.mark.thorough),
        pytest.param("average saved", (2, 2), TWICE, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_an_interrupted_run_has_the_same_bits(tmp_path: Path, kind, mesh, interruptions):
    whole = trained(tmp_path / "whole", kind, mesh=mesh)
    resumed = interrupt(tmp_path / "resumed", kind, mesh, interruptions)
    assert [each.value for each in resumed] == [each.value for each in whole], resumed[0].output


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrapper", "mesh"),
    [
        ("wrapped", (2, 1)),
        pytest.param("compiled", (2, 1), marks=pytest.mark.thorough),
        pytest.param("compiled", None, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_wrappers_are_switched_on_and_off(tmp_path: Path, undisturbed, wrapper, mesh):
    """Those of activation checkpointing, and of torch.compile."""
    expected = undisturbed[1]
    if mesh is None:  # DDP
        whole = trained(tmp_path / "whole", mesh=None, ranks_of_nodes=(2,))
        expected = [each.value for each in whole]
    for kind, interruption in (("", "stop at 0:3"), (wrapper, "kill at 1:3"), ("", "")):
        try:
            ended = trained(tmp_path, kind, interruption, mesh=mesh, ranks_of_nodes=(2,))
        except EOFError:
            continue
        error = "Interrupted: 143" if interruption else ""
        assert {each.error for each in ended} == {error}, ended[0].output
        assert "warning: resumed" not in ended[0].output
    found = [each.value for each in ended]
    if wrapper == "wrapped":  # it calls modules once more
        found = [
            replace(each, calls=whole.calls) for each, whole in zip(found, expected, strict=True)
        ]
    assert found == expected


def samples(folder: Path) -> dict[int, list[int]]:
    """Return the numbers of the samples that all ranks were trained on, by step."""
    found: dict[int, list[int]] = {}
    for path in folder.glob("node-*/seen-*"):
        for line in path.read_text().splitlines():
            step, numbers = line.split(" ", 1)
            found.setdefault(int(step), []).extend(ast.literal_eval(numbers))
    return {step: sorted(numbers) for step, numbers in sorted(found.items())}


def test_other_ranks_continue_with_the_same_samples(tmp_path: Path, undisturbed):
    chain = [
        ((4, 1), "stop at 0:0"),
        ((2, 1), "stop at 0:2"),
        ((3, 1), "stop at 0:4"),
        (None, "stop at 0:6"),  # DDP, with two ranks
        ((1, 1), "stop at 1:0"),
        ((4, 1), ""),
    ]
    for mesh, interruption in chain:
        nodes = (2,) if mesh is None else None
        ended = trained(tmp_path / "chain", "", interruption, mesh=mesh, ranks_of_nodes=nodes)
        expected = "Interrupted: 143" if interruption else ""
        assert {each.error for each in ended} == {expected}, ended[0].output
    line = (
        "; 1 ranks, with a model sharded as 1x1 saved it, now there are 4, with a model sharded as"
    )
    assert line in ended[0].output
    assert samples(tmp_path / "chain") == samples(undisturbed[0])


def test_an_epoch_that_has_other_batches_with_other_ranks_is_said(tmp_path: Path):
    line = (
        "warning: an epoch has 8 batches now, and had 4 with 2 ranks, with a model sharded as 2x1: "
    )
    for mesh, interruption in (((2, 1), "stop at 0:1"), ((1, 1), "stop at 0:6"), ((1, 1), "")):
        ended = trained(tmp_path, "", interruption, mesh=mesh, batch_size=12)
        is_another = interruption == "stop at 0:6"
        assert (line in ended[0].output) is is_another, ended[0].output
    assert "an epoch has" not in ended[0].output


@pytest.mark.parametrize(
    "kind",
    [
        "averaged",
        pytest.param("", marks=pytest.mark.thorough),
        pytest.param("buffers", marks=pytest.mark.thorough),
        pytest.param("averaged later", marks=pytest.mark.thorough),
        pytest.param("average saved", marks=pytest.mark.thorough),
    ],
)
def test_other_ranks_have_the_same_state(tmp_path: Path, kind):
    """Buffers that each rank has of its own samples, in no state dict, are as rank 0's.

    DTensors that callbacks keep, such as averages of weights, are shared out as the weights are.
    """
    first = trained(tmp_path, kind, mesh=(2, 2))
    for mesh in ((3, 1), None, (1, 1)):
        ended = trained(tmp_path, kind, mesh=mesh, ranks_of_nodes=(2,) if mesh is None else None)
        assert "nothing is left to train" in ended[0].output, ended[0].output
        assert ended[0].value.weights == first[0].value.weights


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        pytest.param("averaged", ((2, 2), (3, 1), (4, 1)), marks=pytest.mark.thorough),
        pytest.param("averaged later", ((2, 2), (3, 1), (4, 1)), marks=pytest.mark.thorough),
        pytest.param("average saved", ((2, 2), (3, 1), (4, 1)), marks=pytest.mark.thorough),
        pytest.param("averaged", (None, (2, 1), None), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_other_ranks_continue_with_an_average(tmp_path: Path, kind, meshes):
    """From epoch 1 on, the second and the third one make the average again, or have got it."""
    for mesh, interruption in zip(meshes, ("stop at 1:1", "stop at 1:4", ""), strict=True):
        nodes = (2,) if mesh is None else None  # DDP
        ended = trained(tmp_path, kind, interruption, mesh=mesh, ranks_of_nodes=nodes)
        expected = "Interrupted: 143" if interruption else ""
        assert {each.error for each in ended} == {expected}, ended[0].output
        assert "warning: resumed" not in ended[0].output


def test_the_newest_checkpoint_whose_shards_are_intact_on_all_hosts_is_chosen(
    tmp_path: Path, undisturbed
):
    folder = tmp_path / "job"
    trained(folder, "", "stop at 1:2", variables=hosts, **TWO_HOSTS)
    newest = max((folder / "node-1/checkpoints").glob("*-rank-0001-of-0002.shard"))
    content = newest.read_bytes()
    newest.write_bytes(content[:400] + bytes([content[400] ^ 4]) + content[401:])
    ended = trained(folder, variables=hosts, **TWO_HOSTS)
    line = f"needs its shard {newest.name}, which is damaged: its checksum does not match; it is"
    assert f"{line} skipped on 127.0.0.2\n" in ended[1].output
    assert "resuming from step 10" in ended[0].output
    assert [each.value for each in ended] == undisturbed[1]


def hosts(node: int) -> dict[str, str]:
    """Return the variables of a node of two hosts, whose names resolve here."""
    return {"SM_CURRENT_HOST": f"127.0.0.{node + 1}", "SM_HOSTS": '["127.0.0.1", "127.0.0.2"]'}


def test_a_disk_that_is_full_on_one_host_harms_no_checkpoint(tmp_path: Path, undisturbed):
    folder = tmp_path / "job"
    ended = trained(folder, "", "fill at 1:3", variables=hosts, **TWO_HOSTS)
    assert [each.value for each in ended] == undisturbed[1]
    for each in ended:
        line = re.search("^warning: .* no checkpoint could be written to .*", each.output, re.M)
        assert "(on 127.0.0.2: File too large); the newest intact one is step-000000010" in line[0]
    # The shards of the checkpoints that were not finished are gone.
    for node in (0, 1):
        found = {
            int(path.name[5:14]) for path in (folder / f"node-{node}/checkpoints").glob("step-*")
        }
        assert max(found) == 10
    resumed = trained(folder, **TWO_HOSTS)
    assert "resuming from step 10" in resumed[0].output
    assert [each.value for each in resumed] == undisturbed[1]


def test_hosts_that_have_different_checkpoints_resume_from_one_that_all_have(
    tmp_path: Path, undisturbed
):
    folder = tmp_path / "job"
    trained(folder, "", "stop at 1:2", **TWO_HOSTS)
    (folder / "node-0/checkpoints/step-000000012.ckpt").unlink()
    ended = trained(folder, **TWO_HOSTS)
    assert "resuming from step 10" in ended[0].output
    assert [each.value for each in ended] == undisturbed[1]


def test_hosts_that_nobody_names_have_folders_of_their_own(tmp_path: Path, undisturbed):
    def train(*arguments) -> list[ranks.Ended]:
        function = sharded.train_in_folder_of_rank
        return ranks.run(function, *arguments, nodes=(1, 1), folder=tmp_path)

    train("stop at 1:2")
    ended = train()
    assert "resuming from step 12" in ended[0].output
    assert [each.value for each in ended] == undisturbed[1]
    shutil.rmtree(tmp_path / "node-1/checkpoints-1")
    for each in train():
        assert re.search(
            r"\(node 0 \(\S+\) has step 16 in checkpoints-0; "
            r"node 1 \(\S+\) has none in checkpoints-1\)",
            each.error,
        )


def test_hosts_with_different_sizes_are_refused(tmp_path: Path):
    ended = ranks.run(
        sharded.train_with_sizes_of_rank, nodes=(1, 1), folder=tmp_path, variables=hosts
    )
    for each in ended:
        assert each.error == (
            "UserError: ModelParallelStrategy: found data_parallel_size=2 and "
            "tensor_parallel_size=1 on host 127.0.0.1 and data_parallel_size=1 and "
            "tensor_parallel_size=2 on host 127.0.0.2, expected the same sizes on all hosts; start "
            "them with the same"
        )


@pytest.mark.parametrize(
    ("kind", "mesh", "says"),
    [
        (
            "tie split",
            (2, 1),
            "configure_model(): found tied weights that are split (network.embedding.weight and "
            "network.head.weight), each of which would be trained",
        ),
        (
            "wrong dimension",
            (2, 1),
            "configure_model(): found weights (network.embedding.weight, "
            "network.blocks.0.first.weight, network.blocks.0.first.bias) that are shared out over",
        ),
        (
            "early optimizer",
            (2, 1),
            "configure_optimizers(): found Adam, which was made before fully_shard() or "
            "parallelize_module() has put others in the places of its weights (network.embedding.",
        ),
        (
            "other seeds",
            (1, 2),
            "configure_model(): found other values of network.embedding.weight on rank 1 than on",
        ),
    ],
)
def test_a_model_that_is_shared_out_wrongly_ends_the_run(tmp_path: Path, kind, mesh, says):
    for each in trained(tmp_path, kind, mesh=mesh):
        assert each.error.startswith(f"UserError: {says}")


def test_hosts_get_all_shards_from_s3(tmp_path: Path, undisturbed):
    """SageMaker copies what all hosts have written to one prefix, and gives each host all of it."""
    folder = tmp_path / "job"
    trained(folder, "", "stop at 1:1", **TWO_HOSTS)
    copies = {}
    for host in ("node-0", "node-1"):
        for path in (folder / host / "checkpoints").iterdir():
            copies[path.name] = path.read_bytes()
            path.unlink()
    step = max(int(name[5:14]) for name in copies if name.endswith(".ckpt"))
    for host in ("node-0", "node-1"):
        for name, content in copies.items():
            (folder / host / "checkpoints" / name).write_bytes(content)
    ended = trained(folder, **TWO_HOSTS)
    assert f"resuming from step {step}" in ended[0].output
    assert [each.value for each in ended] == undisturbed[1]


def test_old_shards_are_removed(tmp_path: Path):
    ended = trained(tmp_path, keep=1)
    assert not any(each.error for each in ended)
    (own_file,) = (tmp_path / "checkpoints").glob("*.ckpt")
    found = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.shard"))
    step = int(own_file.name[5:14])
    assert found == sorted(path.name for _, path in shards.paths_in(tmp_path / "checkpoints", step))
    assert len(found) == 2


def test_lightnings_files_have_the_whole_model_and_begin_other_runs(tmp_path: Path):
    models = tmp_path / "models"
    ended = trained(tmp_path / "first", mesh=(2, 2), models=models)
    file = torch.load(models / "model.ckpt", weights_only=True)
    found = sharded.hash_of(file["state_dict"], file["optimizer_states"])
    assert found == ended[0].value.weights
    # It is at the end of its epochs: what begins with it trains nothing.
    for mesh in ((3, 1), None):
        nodes = (2,) if mesh is None else None
        begun = trained(
            tmp_path / f"from {mesh}", mesh=mesh, ranks_of_nodes=nodes, begin=models / "model.ckpt"
        )
        assert begun[0].value.weights == found, begun[0].output


@pytest.mark.parametrize("file_bytes", [1000, pytest.param(10**6, marks=pytest.mark.thorough)])
def test_the_whole_model_is_exported_in_files_of_a_size(tmp_path: Path, file_bytes: int):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.pt", "model-00001-of-00099.safetensors"):
        (folder / name).touch()
    flags = [
        "--trainer.accelerator=cpu",
        "--trainer.strategy=ModelParallelStrategy",
        "--trainer.strategy.data_parallel_size=2",
        "--trainer.strategy.tensor_parallel_size=2",
        "--trainer.max_epochs=2",
    ]
    variables = {"SM_MODEL_DIR": str(folder), "SM_OUTPUT_DATA_DIR": str(tmp_path / "output")}
    ended = ranks.run(
        sharded.export,
        file_bytes,
        *flags,
        nodes=(4,),
        folder=tmp_path,
        variables=lambda node: variables,
    )
    assert not any(each.error for each in ended), ended[0].output
    names = {path.name for path in folder.glob("model*")} - {"model.json"}
    if file_bytes == 10**6:
        assert names == {"model.pt"}
        weights = torch.load(folder / "model.pt", weights_only=True)
    else:
        assert f"model: {folder}/{safetensors_files.INDEX}" in ended[0].output
        count = len(names) - 1
        assert count > 2 and f"model-{count:05d}-of-{count:05d}.safetensors" in names
        parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        # An embedding of 7 x 12 float32, and the first layers of 22 x 12.
        assert max(sum(weight.nbytes for weight in part.values()) for part in parts) == 22 * 12 * 4
        weights = {name: weight for part in parts for name, weight in part.items()}
        network = sharded.Network()
        network.load_state_dict(weights)
        weights = network.state_dict()
    assert json.loads((folder / "model.json").read_text())["best_model"]
    assert sharded.hash_of(weights, []) == ended[0].value


# `python tests/tools/sharded_soak.py` does as many rounds as one likes, and counts them by kind.
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", sharded_soak.KINDS)
def test_random_interruptions_leave_the_same_bits(kind: str, seed: int):
    round = sharded_soak.interrupted(kind, seed)
    assert not round.problem, round
