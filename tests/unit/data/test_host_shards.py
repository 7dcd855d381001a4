"""Data split over the nodes (ShardedByS3Key): no hang, whatever the shards' sizes.

And every image of a step counts the same.
"""

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import ranks
import torch
from containers import ROOT
from pytorch_lightning import Callback
from torch import distributed

from sagemaker_lightning.callbacks.rank_consistency import RankConsistency
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data import host_shards
from sagemaker_lightning.data.gather import gather
from sagemaker_lightning.data.host_shards import Shard

from app import train
from app.data import CIFAR10DataModule, DigitsDataModule
from app.in_memory import ResidentLoader
from app.train import APPLICATION

SHARDED = '{"training": {"TrainingInputMode": "File", "S3DistributionType": "ShardedByS3Key"}}'


class Part(ranks.Numbered):
    """The first few of a node's hundred numbers: `sizes` says how many."""

    sharded = True

    def __init__(self, sizes: list[int], **options) -> None:
        super().__init__(0, **options)
        self.sizes = sizes

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        node = self.trainer.node_rank
        images = (
            np.random.RandomState(node)
            .randint(0, 256, (self.sizes[node], 3, 8, 8))
            .astype(np.uint8)
        )
        return images, 100 * node + np.arange(self.sizes[node])


class Save(Callback):
    """Writes a checkpoint after 7 batches."""

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == 7:
            trainer.save_checkpoint("../seven.ckpt")


def fit(sizes: list[int], options: dict, epochs: int = 2, ckpt_path: str | None = None):
    """Train on parts of these sizes; return the numbers that the model saw, batch by batch."""
    model = ranks.Regression()
    trainer = ranks.trainer(
        [RankConsistency(SageMakerEnvironment(), {}), Save()], max_epochs=epochs
    )
    trainer.fit(model, Part(sizes, **options), ckpt_path=ckpt_path)
    return {"seen": model.seen, "val": model.validated}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "sizes", "options", "steps", "left_out"),
    [
        ([1, 1], [24, 44], {}, 5, "17 of 64 training images and 0 of 4"),
        ([1, 1], [24, 44], {"drop_last": True}, 4, "24 of 64 training images and 0 of 4"),
        ([2, 2], [32, 18], {"val_split": 0.25}, 2, "4 of 38 training images and 0 of 12"),
        ([1, 1, 1], [7, 90, 30], {"val_split": 3}, 2, "98 of 124 training images and 0 of 3"),
        ([2, 2], [5, 41], {"val_split": 5}, 1, "29 of 41 training images and 0 of 5"),
    ],
)
def test_all_ranks_make_the_same_steps(tmp_path: Path, nodes, sizes, options, steps, left_out):
    ended = ranks.run(fit, sizes, {"batch_size": 5} | options, nodes=nodes, folder=tmp_path)
    assert not any(rank.error for rank in ended), [rank.error for rank in ended]
    assert {len(rank.value["seen"]) for rank in ended} == {2 * steps}
    assert (
        f"an epoch of {steps} steps" in ended[0].output
        and f"leaves out {left_out}" in ended[0].output
    )
    assert not any("shards" in rank.output for rank in ended[1:])
    epochs = [
        [
            number
            for rank in ended
            for indices in rank.value["seen"][first_step : first_step + steps]
            for number in indices
        ]
        for first_step in (0, steps)
    ]
    for numbers in epochs:
        assert len(numbers) == len(set(numbers))  # no image twice
    validated = [set(sum((rank.value["val"][0] for rank in ended), []))]
    assert not validated[0] & set(epochs[0])
    owners = [node for node, count in enumerate(nodes) for _ in range(count)]
    for node, rank in zip(owners, ended, strict=True):
        assert {
            number // 100
            for indices in rank.value["seen"] + rank.value["val"]
            for number in indices
        } == {node}
    if int(left_out.split()[0]) > 2:
        assert set(epochs[0]) != set(epochs[1])  # other images are left out


class Keeper(ranks.Regression):
    """Keeps its batches."""

    def training_step(self, batch, batch_idx):
        self.batches = [*getattr(self, "batches", []), batch]
        return super().training_step(batch, batch_idx)


def fit_and_keep(sizes: list[int]):
    model = Keeper()
    ranks.trainer([RankConsistency(SageMakerEnvironment(), {})], max_epochs=1).fit(
        model, Part(sizes, batch_size=5)
    )
    return model.batches, model.gradients


@pytest.mark.slow
def test_the_gradient_is_that_of_one_process_on_the_samples_of_all_nodes(tmp_path: Path):
    """19 and 30 images, on two ranks each: the second batch has 5 + 4 and 5 + 5."""
    ended = ranks.run(fit_and_keep, [21, 32], nodes=[2, 2], folder=tmp_path)
    assert not ended[0].error, ended[0].output
    assert [[len(batch_part[1]) for batch_part in rank.value[0]] for rank in ended] == [
        [5, 5],
        [5, 4],
        [5, 5],
        [5, 5],
    ]
    model = ranks.Regression()
    optimizer = model.configure_optimizers()
    for batch in range(2):
        optimizer.zero_grad()
        parts = [rank.value[0][batch] for rank in ended]
        model.loss([torch.cat(batch_part) for batch_part in zip(*parts, strict=True)]).backward()
        expected = torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])
        optimizer.step()
        for rank in ended:
            torch.testing.assert_close(rank.value[1][batch], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_continues_in_mid_epoch_where_it_stopped(tmp_path: Path):
    options = {"batch_size": 5}
    uninterrupted_ranks = ranks.run(fit, [24, 44], options, 3, nodes=[1, 1], folder=tmp_path)
    resumed_ranks = ranks.run(
        fit, [24, 44], options, 3, "../seven.ckpt", nodes=[1, 1], folder=tmp_path
    )
    for uninterrupted, resumed in zip(uninterrupted_ranks, resumed_ranks, strict=True):
        assert len(uninterrupted.value["seen"]) == 15 and not resumed.error, resumed.output
        assert resumed.value["seen"] == uninterrupted.value["seen"][7:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        (
            [12, 1],
            {"val_split": 0.25},
            r"--data.val_split: found 0.25, expected 1 to 0 of .*\(on host node-1\)",
        ),
        (
            [2, 12],
            {"val_split": 2},
            "--data.data_dir: found 1 training images on host node-0, which has 2 ranks",
        ),
    ],
)
def test_a_shard_that_is_too_small_is_an_error_on_every_rank(tmp_path: Path, sizes, options, says):
    ended = ranks.run(
        fit,
        sizes,
        {"batch_size": 5} | options,
        nodes=[2, 2],
        folder=tmp_path,
        variables=lambda node: {"SM_CURRENT_HOST": f"node-{node}"},
    )
    assert len({rank.error for rank in ended}) == 1
    assert re.match(f"UserError: {says}", ended[0].error), ended[0].error


def test_augmentation_and_order_differ_between_nodes():
    have = [Shard("a", 2, 40, 4), Shard("b", 1, 40, 4)]
    options = [host_shards.ranks(have, "train", rank, 42) for rank in range(3)]
    assert [(rank_options["rank"], rank_options["world_size"]) for rank_options in options] == [
        (0, 2),
        (1, 2),
        (0, 1),
    ]
    assert options[0]["seed"] == options[1]["seed"] != options[2]["seed"]
    assert (
        options[0]["shards"] == [(40, 2), (40, 1)] and host_shards.ranks([], "train", 2, 42) == {}
    )


def test_any_value_is_gathered(tmp_path: Path):
    value = (Shard("a", 1, 2, 3), torch.tensor([1, 2], dtype=torch.uint16))
    assert gather(value)[0] is value
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        ((shard, tensor),) = gather(value)
    finally:
        distributed.destroy_process_group()
    assert shard == value[0] and tensor.tolist() == [1, 2] and tensor.dtype == torch.uint16


def on_node(data: ranks.Numbered, node: int) -> ranks.Numbered:
    """Give a data module a trainer of this node, which has one rank, of two."""
    data.trainer = SimpleNamespace(
        node_rank=node,
        num_nodes=2,
        global_rank=node,
        world_size=2,
        is_global_zero=node == 0,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return data


@pytest.mark.parametrize("node", [0, 1])
def test_each_node_reads_and_splits_its_own_part_and_knows_that_of_the_other(node, monkeypatch):
    monkeypatch.setenv("SM_CURRENT_HOST", f"algo-{node + 1}")
    others = [(0, "host algo-1", (9, 3), "", False), (1, "host algo-2", (20, 2), "", False)]
    other = others[1 - node]
    monkeypatch.setattr(host_shards, "gather", lambda value: sorted([value, other]))
    log = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log))
    data = on_node(Part([12, 22], val_split=5, batch_size=4), node)
    data.setup("fit")
    assert data.shards == [Shard("host algo-1", 1, 9, 3), Shard("host algo-2", 1, 20, 2)]
    numbers = torch.cat([data.sets[split].labels for split in ("train", "val")])
    assert sorted(numbers.tolist()) == [100 * node + number for number in range((12, 22)[node])]
    says = f"{host_shards.line(data.shards, 4, False)}\n" if node == 0 else ""
    assert log.getvalue().decode() == says  # at once, even if the output is a file
    train_loader = data.train_dataloader()
    assert len(train_loader) == 3 and train_loader.sizes(0, 2) == [1, 4]
    assert train_loader.seed == f"42, node {node}"
    ((_, labels),) = data.val_dataloader()
    assert labels.tolist() == data.sets["val"].labels.tolist()


def test_a_node_without_the_test_images_gets_another_ones(monkeypatch):
    """Unlike the training images, each node has them all, and tests on its share."""

    def share(read):
        assert read() == "train=False"
        return np.zeros((8, 3, 8, 8), np.uint8), np.arange(8)

    monkeypatch.setattr(host_shards, "share", share)
    for node in range(2):
        data = on_node(Part([12, 22]), node)
        data.load = lambda train: f"train={train}"
        data.shards = [Shard("a", 1, 8, 4), Shard("b", 1, 18, 4)]
        data.setup("test")
        ((_, labels),) = data.test_dataloader()
        assert labels.tolist() == list(range(4 * node, 4 * node + 4))


@pytest.mark.parametrize("node", [0, 1])
def test_nodes_with_the_same_images_read_and_split_them_alone(node, capsys):
    data = on_node(ranks.Numbered(24, val_split=8, batch_size=4), node)
    data.setup()
    assert data.shards == [] and capsys.readouterr().out == ""
    assert data.num_samples == 16 and len(data.sets["val"]) == 8
    for split, data_loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        numbers = data.sets[split].labels.tolist()
        assert [labels.tolist() for _, labels in data_loader] == [
            numbers[first : first + 4] for first in range(4 * node, len(numbers), 8)
        ]


@pytest.mark.parametrize(
    ("val_split", "says"),
    [
        (6, r"found 6 \(3 of them on this host\), expected 1 to 2 of the 3 images, or a"),
        (0.2, "found 0.2, expected 1 to 2 of the 3 images, or a"),
    ],
)
def test_the_validation_images_of_a_small_part(val_split, says):
    with pytest.raises(UserError, match=f"^--data.val_split: {says}"):
        on_node(Part([12, 3], val_split=val_split), 1).setup("fit")


def raising(error: Exception):
    """Return a function that raises it."""

    def read():
        raise error

    return read


def test_one_image_for_each_rank_is_enough(monkeypatch):
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    (shard,) = host_shards.agree(lambda: (1, 1), 0)
    assert (shard.ranks, shard.train, shard.val) == (1, 1, 1)
    for sizes, flag, kind in (((0, 1), "data_dir", "training"), ((1, 0), "val_split", "valid")):
        with pytest.raises(UserError, match=f"--data.{flag}: found 0 {kind}.* which has 1 ranks"):
            host_shards.agree(lambda sizes=sizes: sizes, 0)


def test_nodes_are_told_apart_by_their_ranks(monkeypatch):
    """Nodes that are rehearsed on one machine may have its name in common."""
    others = [(0, "host a", (8, 2), "", False), (1, "host a", (6, 3), "", False)]
    monkeypatch.setenv("SM_CURRENT_HOST", "a")
    monkeypatch.setattr(host_shards, "gather", lambda value: [value, *others])
    assert host_shards.agree(lambda: (8, 2), 0) == [
        Shard("host a", 2, 8, 2),
        Shard("host a", 1, 6, 3),
    ]


def test_a_file_that_is_missing_is_explained(monkeypatch):
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    needed = "; with ShardedByS3Key, each host needs training files of its own "
    with pytest.raises(UserError, match=rf"^no file{needed}\(on host algo-2\)$"):
        host_shards.agree(raising(FileNotFoundError("no file")), 0)
    with pytest.raises(UserError, match=r"^no right \(on host algo-2\)$"):
        host_shards.agree(raising(PermissionError("no right")), 0)


MISSING = ("a", "no file", True)


def share(monkeypatch, read, *answers: tuple[str, str, bool]):
    """Return what `share` returns, on a rank before others that answer so, and who sent files."""
    senders = []

    def send(objects: list, src: int) -> None:
        senders.append(src)
        if src:
            objects[0] = "sent"

    monkeypatch.setattr(host_shards, "gather", lambda value: [value, *answers])
    monkeypatch.setattr(distributed, "broadcast_object_list", send)
    return host_shards.share(read), senders


def test_the_first_rank_that_has_the_files_sends_them(monkeypatch):
    missing = raising(FileNotFoundError("no file"))
    assert share(monkeypatch, missing, MISSING, ("b", "", False), ("c", "", False)) == ("sent", [2])
    assert share(monkeypatch, lambda: "own", MISSING, ("b", "", False)) == ("own", [0])
    assert share(monkeypatch, lambda: "own", ("b", "", False)) == ("own", [])
    with pytest.raises(UserError, match=r"^no file \(on "):
        share(monkeypatch, missing, MISSING)
    with pytest.raises(UserError, match=r"^no right \(on b\)"):
        share(monkeypatch, lambda: "own", MISSING, ("b", "no right", False))


def test_the_log_says_what_the_hosts_have():
    shards = [Shard("a", 1, 22, 12), Shard("b", 2, 42, 8)]
    have = "shards, training + validation images: a 22 + 12, b 42 + 8; an epoch of "
    fewest = "steps, the fewest that one has, leaves out"
    assert host_shards.line(shards, 5, False) == (
        f"{have}4 {fewest} 2 of 64 training images and 7 of 20 validation images"
    )
    assert host_shards.line(shards, 5, True) == (
        f"{have}4 {fewest} 4 of 64 training images and 7 of 20 validation images"
    )


# The program --------------------------------------------------------------------------------------


def write_shards(folder: Path, *names: list[str], images: int = 40) -> list[Path]:
    """Write a channel for each node, and return their folders.

    A channel has the files that are named for it, of a CIFAR-10 with `images` a file.
    """
    all_files = conftest.write_cifar(folder / "whole", images)
    for node, files in enumerate(names):
        shard = folder / f"channel-{node}" / "cifar-10-batches-py"
        shard.mkdir(parents=True)
        for name in files:
            (shard / name).write_bytes((all_files / name).read_bytes())
    return [folder / f"channel-{node}" for node in range(len(names))]


def toolkit(folders: list[Path], **variables: str):
    """Return the toolkit's variables of each node."""
    hosts = [f"algo-{node + 1}" for node in range(len(folders))]
    return lambda node: (
        {
            "SM_HOSTS": json.dumps(hosts),
            "SM_CURRENT_HOST": hosts[node],
            "SM_CHANNELS": '["training"]',
            "SM_CHANNEL_TRAINING": str(folders[node]),
            "SM_INPUT_DATA_CONFIG": SHARDED,
            "SM_OUTPUT_DIR": os.curdir,
        }
        | variables
    )


def program(*flags: str) -> None:
    settings = ["--trainer.accelerator=cpu", "--data.batch_size=16", "--trainer.max_epochs=1"]
    train.main([*flags, "--model=one_layer.OneLayer", *settings])


ONE_STEP = [
    "--data.val_split=10",
    "--trainer.limit_train_batches=1",
    "--trainer.limit_val_batches=1",
]
FOUR = (
    ["data_batch_1", "data_batch_3"],
    ["data_batch_2", "data_batch_4", "data_batch_5", "test_batch"],
)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [[1, 1], [2, 2]])
def test_a_job_with_a_sharded_channel(tmp_path: Path, nodes):
    """Only the second host has the file of the test images."""
    folders = write_shards(tmp_path, *FOUR)
    flags = ["--data=CIFAR10DataModule", "--data.val_split=41", f"--trainer.devices={nodes[0]}"]
    ended = ranks.run(program, *flags, nodes=nodes, folder=tmp_path, variables=toolkit(folders))
    assert not any(rank.error for rank in ended), ended[-1].output
    steps = 4 if nodes == [1, 1] else 2  # 80 - 21 images in batches of 16 for each rank
    assert (
        f"host algo-1 59 + 21, host algo-2 100 + 20; an epoch of {steps} steps, the fewest "
        "that one has" in ended[0].output
    )
    assert "leaves out" in ended[0].output and "dataset fingerprint" not in ended[0].output
    written = json.loads((tmp_path / "node-0/output/model/model.json").read_text())
    assert (
        "test_acc" in written["metrics"]
        and not (tmp_path / "node-1/output/model/model.json").exists()
    )


LACKING = {
    "no training file": (
        [*FOUR[0], *FOUR[1][:3]],
        ["test_batch"],
        r"holds no CIFAR-10 \(found: cifar-10-batches-py/\).*"
        r"\(on host algo-2\)",
    ),
    "a damaged file": (
        ["data_batch_1"],
        ["data_batch_2", "test_batch"],
        r"data_batch_2 is not a CIFAR-10 batch.*"
        r"\(on host algo-2\)",
    ),
    "no test file": (
        ["data_batch_1"],
        ["data_batch_2"],
        r"holds no CIFAR-10 \(found: cifar-10-batches-py/\).*\(on "
        r"host algo-1\)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "says"), LACKING.values(), ids=LACKING.keys())
def test_what_a_node_lacks_is_one_line_on_every_rank(tmp_path: Path, first, second, says):
    folders = write_shards(tmp_path, first, second)
    if "is not" in says:
        (folders[1] / "cifar-10-batches-py/data_batch_2").write_bytes(b"nothing")
    ended = ranks.run(program, *ONE_STEP, nodes=[1, 1], folder=tmp_path, variables=toolkit(folders))
    for node, rank in enumerate(ended):
        assert rank.error == "SystemExit: 1" and re.search(f"error: .*{says}", rank.output), (
            rank.output
        )
        assert re.search(says, (tmp_path / f"node-{node}/failure").read_text())
        assert "Traceback" not in rank.output.partition("error: ")[0]


@pytest.mark.slow
def test_a_damaged_test_file_on_one_of_two_hosts_that_have_it(tmp_path: Path):
    folders = write_shards(tmp_path, [*FOUR[0], "test_batch"], FOUR[1])
    (folders[1] / "cifar-10-batches-py/test_batch").write_bytes(b"nothing")
    ended = ranks.run(program, *ONE_STEP, nodes=[1, 1], folder=tmp_path, variables=toolkit(folders))
    assert all(
        re.search(r"error: .*test_batch is not a CIFAR-10 batch.*\(on host algo-2\)", rank.output)
        for rank in ended
    )


@pytest.mark.slow
@pytest.mark.parametrize("data_flags", [(), ("--data=CIFAR10DataModule",)])
def test_the_channel_says_whether_data_is_sharded(data_flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests/support"))
    two_hosts = {
        "hosts": ("a", "b"),
        "current_host": "a",
        "channels": {"training": Path("/channel")},
    }
    sharded = SageMakerEnvironment(**two_hosts, sharded_channels=frozenset({"training"}))
    flags = ["--trainer.accelerator=cpu", "--trainer.strategy=ddp"]
    datamodule = CommandLine(sharded, [*data_flags, *flags], APPLICATION).datamodule
    assert (
        type(datamodule) is CIFAR10DataModule
        and datamodule.sharded is True
        and datamodule.data_dir == "/channel"
    )
    assert (
        CommandLine(
            sharded, [*data_flags, "--data.sharded=false", *flags], APPLICATION
        ).datamodule.sharded
        is False
    )
    assert (
        CommandLine(
            SageMakerEnvironment(**two_hosts), [*data_flags, *flags], APPLICATION
        ).datamodule.sharded
        is False
    )
    if not data_flags:  # for classes without such a parameter
        assert CommandLine(
            sharded,
            ["--data=foreign.Data", "--data.size=16", "--model=foreign.Model", *flags],
            APPLICATION,
        ).datamodule.size
        assert (
            type(CommandLine(sharded, ["--data=DigitsDataModule", *flags], APPLICATION).datamodule)
            is DigitsDataModule
        )


def test_one_node_reads_the_files_that_are_there(tmp_path):
    (folder,) = write_shards(tmp_path, ["data_batch_4", "data_batch_2"])
    data = CIFAR10DataModule(str(folder), sharded=True, val_split=20)
    data.setup("fit")
    loader = data.train_dataloader()
    assert len(data.sets["train"]) == data.num_samples == 60 and type(loader) is ResidentLoader
    images = torch.cat([data.sets[name].images for name in ("train", "val")]).flatten(1)
    files = np.concatenate([conftest.batch(40, number)["data"] for number in (1, 3)])
    assert sorted(images.tolist()) == sorted(files.tolist())
    with pytest.raises(UserError, match="data_batch_1 is missing"):
        CIFAR10DataModule(str(folder), val_split=20).setup("fit")
