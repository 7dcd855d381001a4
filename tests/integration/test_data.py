"""The data path: a pure function of (seed, epoch, position), with Lightning Bolts' split."""

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
import torch
import warm
from conftest import ROOT, write_cifar
from pytorch_lightning import LightningModule, Trainer
from torchvision.transforms import functional

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.partition import BatchDivision, EpochPlan

from app.augmentation import PADDING, Augmentation, Normalize, generator
from app.data import CIFAR10DataModule, DigitsDataModule
from app.in_memory import ResidentLoader, ResidentSet


def numbered(size: int) -> ResidentSet:
    """Return images that carry their number: label k, and all pixels k % 256."""
    labels = torch.arange(size)
    return ResidentSet(
        (labels % 256).to(torch.uint8)[:, None, None, None].expand(size, 3, 8, 8).contiguous(),
        labels,
    )


def loader(size=103, **options) -> ResidentLoader:
    defaults = {"batch_size": 10, "normalize": Normalize(), "seed": 5, "shuffle": True}
    return ResidentLoader(numbered(size), **defaults | options)


def labels_of(loader) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    epochs = [
        sum(labels_of(loader(position=lambda epoch=epoch: (epoch, 0))), []) for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(103)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] == sum(labels_of(loader()), [])
    assert epochs[0] != sum(labels_of(loader(seed=6)), [])
    assert sum(labels_of(loader(shuffle=False)), []) == list(range(103))


def test_an_iteration_that_starts_in_mid_epoch_sees_the_rest_of_it():
    all_batches = list(loader(augment=True, flip=True, position=lambda: (1, 0)))
    remaining = list(loader(augment=True, flip=True, position=lambda: (1, 4)))
    assert len(all_batches) == 11 and len(remaining) == 7
    for (images, labels), (other_images, other_labels) in zip(
        all_batches[4:], remaining, strict=True
    ):
        assert torch.equal(images, other_images) and torch.equal(labels, other_labels)


def test_an_iteration_of_somebody_elses_sees_all_of_the_epoch():
    """A loader that knows where an epoch begins starts there, wherever training is."""
    resident_loader = loader(position=lambda: (1, 9))
    assert len(list(resident_loader)) == 2
    resident_loader.begin(1, 4)
    assert [len(list(resident_loader)) for _ in range(3)] == [7, 11, 11]


@pytest.mark.parametrize("size", [40, 41, 42, 43, 59, 60, 61, 97])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_each_global_batch(size, world_size, drop_last):
    options = {"batch_size": 5, "world_size": world_size, "drop_last": drop_last}
    ranks = [labels_of(loader(size, rank=rank, **options)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1  # as many steps on every rank
    # With several ranks, no batch has a single sample.
    assert all(len(batch) > (world_size > 1) for batches in ranks for batch in batches)
    together = [sum(parts, []) for parts in zip(*ranks, strict=True)]
    sizes = loader(size, **options).sizes
    assert [list(map(len, parts)) for parts in zip(*ranks, strict=True)] == [
        sizes(0, k) for k in range(len(together))
    ]
    one_process = labels_of(loader(size, batch_size=5 * world_size, drop_last=drop_last))
    indices = sum(together, [])
    assert indices == sum(one_process, []) if drop_last else sorted(indices) == list(range(size))
    if drop_last:
        assert all(len(batch) == 5 * world_size for batch in together)


@pytest.mark.parametrize(
    ("size", "ranks", "drop_last", "sizes"),
    [
        (41, 1, False, [5] * 8 + [1]),
        (40, 2, False, [10] * 4),
        (41, 2, False, [10] * 3 + [11]),
        (43, 2, False, [10] * 3 + [13]),
        (44, 2, False, [10] * 4 + [4]),
        (44, 2, True, [10] * 4),
        (51, 3, False, [15] * 3 + [6]),
        (3, 2, False, [3]),
        (1, 2, False, []),
        (4, 1, True, []),
    ],
)
def test_a_remainder_is_a_batch_if_each_rank_has_two_samples_of_it(size, ranks, drop_last, sizes):
    division = BatchDivision(size, 5, ranks, drop_last)
    assert [len(division.positions(batch)) for batch in range(division.batches)] == sizes
    for batch, length in enumerate(sizes):
        parts = [division.part(batch, rank) for rank in range(ranks)]
        assert list(map(len, parts)) == division.sizes(batch)
        assert sum(map(list, parts), []) == list(division.positions(batch))
        assert sum(division.sizes(batch)) == length


def test_no_batch_may_be_left_of_an_epoch_for_more_ranks():
    epoch_plan = EpochPlan(BatchDivision(103, 10, 4))
    epoch_plan.continue_from(1, 100)
    division, first = epoch_plan.of_epoch(1)
    assert (division.batches, first) == (0, 3) and epoch_plan.reached(1, 3) == 100


@pytest.mark.parametrize("drop_last", [False, True])
def test_nodes_with_other_data_make_the_same_steps(drop_last):
    """They do so with different numbers of ranks, too."""
    shards = [(23, 1), (61, 3), (37, 2)]
    options = {"batch_size": 4, "drop_last": drop_last, "shards": shards}
    loaders = [
        loader(size, rank=rank, world_size=local, **options)
        for size, local in shards
        for rank in range(local)
    ]
    batches = [labels_of(rank_loader) for rank_loader in loaders]
    # 23 samples are 5 batches of 4 and a rest of 3, 61 are 5 of 12 and a rest of 1, 37 are 4 of 8
    # and a rest of 5.
    assert {len(rank_loader) for rank_loader in loaders} == {4 if drop_last else 5}
    assert [list(map(len, parts)) for parts in zip(*batches, strict=True)] == [
        loaders[0].sizes(0, batch) for batch in range(len(loaders[0]))
    ]
    for first_rank, (size, local) in ((0, shards[0]), (1, shards[1]), (4, shards[2])):
        indices = [
            number
            for rank in batches[first_rank : first_rank + local]
            for batch in rank
            for number in batch
        ]
        assert len(indices) == len(set(indices)) and set(indices) <= set(range(size))
        assert drop_last or size != 37 or len(indices) == 37  # the smallest leaves nothing out


class Prepared(ranks.Numbered):
    """Writes a file on the node's disk when it is prepared."""

    def prepare_data(self) -> None:
        Path(f"prepared-{os.getpid()}").touch()


def train_prepared() -> list[list[int]]:
    model = ranks.Regression()
    ranks.trainer(max_epochs=1).fit(model, Prepared(44, batch_size=5))
    return model.seen


@pytest.mark.slow
def test_on_two_nodes_of_two_ranks_data_is_prepared_once_a_node_and_read_once(tmp_path):
    ended = ranks.run(train_prepared, nodes=[2, 2], folder=tmp_path)
    assert not any(rank.error for rank in ended), ended[0].output
    assert [len(list((tmp_path / f"node-{node}").glob("prepared-*"))) for node in range(2)] == [
        1,
        1,
    ]
    indices = [number for rank in ended for batch in rank.value for number in batch]
    assert len(indices) == len(set(indices)) == 40


@pytest.mark.parametrize(
    ("size", "options", "says"),
    [
        (3, {"world_size": 4}, "10 on 4 ranks is more than the 3 samples there are$"),
        (3, {"drop_last": True}, "10 on 1 ranks is more than the 3 samples there are$"),
        (
            40,
            {"shards": [(40, 1), (1, 2)]},
            "10 on 2 ranks is more than the 1 samples there are on a host$",
        ),
    ],
)
def test_fewer_samples_than_a_batch_of_every_rank_is_an_error_that_names_the_flag(
    size, options, says
):
    with pytest.raises(UserError, match=f"^--data.batch_size: {says}"):
        loader(size, **options)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("ranks_before", "ranks_after"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1), (1, 4)]
)
def test_an_epoch_continues_with_another_number_of_ranks(ranks_before, ranks_after, drop_last):
    """The order stays, no sample comes twice, and only drop_last leaves samples out."""
    options = {"position": lambda: (1, 0), "drop_last": drop_last}
    order = sum(labels_of(loader(position=lambda: (1, 0))), [])
    first_loaders = [
        loader(rank=rank, world_size=ranks_before, **options) for rank in range(ranks_before)
    ]
    for batches_done in range(len(first_loaders[0]) + 1):
        indices_done = [
            sum(parts, []) for parts in zip(*map(labels_of, first_loaders), strict=True)
        ][:batches_done]
        reached = first_loaders[0].epoch_plan.reached(1, batches_done)
        assert sum(indices_done, []) == order[:reached]
        later_loaders = [
            loader(rank=rank, world_size=ranks_after, **options) for rank in range(ranks_after)
        ]
        for later_loader in later_loaders:
            later_loader.epoch_plan.continue_from(1, reached)
            start = later_loader.epoch_plan.of_epoch(1)[1]
            later_loader.position = lambda start=start: (1, start)
        later_batches = [
            sum(parts, []) for parts in zip(*map(labels_of, later_loaders), strict=True)
        ]
        assert start + len(later_batches) == len(later_loaders[0])
        assert sum(later_batches, []) == order[reached : reached + sum(map(len, later_batches))]
        assert [later_loaders[0].sizes(1, start + k) for k in range(len(later_batches))] == [
            [len(labels_of(later_loader)[k]) for later_loader in later_loaders]
            for k in range(len(later_batches))
        ]
        missing = len(order) - reached - sum(map(len, later_batches))
        assert missing < (10 * ranks_after if drop_last else 1) or missing < ranks_after


def test_augmentation_is_torchvisions_for_the_same_choices():
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8)
    choices = Augmentation.of_epoch(seed=1, epoch=2, size=64, flip=True)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2471, 0.2435, 0.2616)
    actual = Normalize(mean, std)(choices.crop(images))
    for k in range(64):
        image = functional.pad(functional.to_pil_image(images[k]), PADDING)
        image = functional.crop(image, int(choices.top[k]), int(choices.left[k]), 32, 32)
        image = functional.hflip(image) if choices.flip[k] else image
        expected = functional.normalize(functional.to_tensor(image), mean, std)
        assert torch.equal(actual[k], expected)
    assert choices.top.unique().tolist() == choices.left.unique().tolist() == list(range(9))
    assert 0 < int(choices.flip.sum()) < 64
    assert not Augmentation.of_epoch(seed=1, epoch=2, size=64, flip=False).flip.any()
    assert torch.equal(Normalize()(images), images / 255)


@pytest.mark.parametrize("options", [{}, {"flip": True}, {"flip": True, "cutout": 3}], ids=str)
def test_the_images_of_an_epoch_are_augmented_by_its_choices(options):
    augmented = loader(40, augment=True, position=lambda: (2, 0), **options)
    images, labels = map(torch.cat, zip(*augmented, strict=True))
    choices = Augmentation.of_epoch(5, 2, 40, flip="flip" in options)
    expected = Normalize()(choices.crop(numbered(40).images[labels]))
    if "cutout" in options:
        expected = choices.cut(expected, 3)
    assert torch.equal(images, expected)
    plain = loader(40, position=lambda: (2, 0), **options)
    images, labels = map(torch.cat, zip(*plain, strict=True))
    assert torch.equal(images, Normalize()(numbered(40).images[labels]))


def test_choices_are_others_for_each_epoch_and_each_seed():
    epochs = [
        Augmentation.of_epoch(seed, epoch, size=64, flip=True)
        for seed, epoch in ((1, 0), (1, 1), (2, 0), ("1, node 0", 0))
    ]
    for name in ("top", "left", "flip", "centre"):
        assert len({tuple(getattr(choices, name).flatten().tolist()) for choices in epochs}) == 4


def test_a_later_version_draws_what_this_one_does():
    """A run that is resumed with another image would see other samples."""
    assert generator("order", 42, 3).initial_seed() == 6342303972418037727


def test_cutout_is_the_papers_for_the_same_centres():
    """A square around a centre that may be anywhere, clipped to the image.

    See arXiv:1708.04552, 3.2.
    """
    images = torch.rand(64, 3, 32, 32) + 1
    choices = Augmentation.of_epoch(seed=1, epoch=0, size=64, flip=False)
    for side in (1, 5, 8, 16):
        actual = choices.cut(images.clone(), side)
        expected = images.clone()
        for image, (row, column) in zip(
            expected, (choices.centre * 32).long().tolist(), strict=True
        ):
            top = row - side // 2
            left_edge = column - side // 2
            image[:, max(top, 0) : top + side, max(left_edge, 0) : left_edge + side] = 0
        assert torch.equal(actual, expected)
    plain = list(loader(augment=True))
    cut = list(loader(augment=True, cutout=3))
    assert all(
        (cut_images[cut_images != 0] == plain_images[cut_images != 0]).all()
        for (plain_images, _), (cut_images, _) in zip(plain, cut, strict=True)
    )
    assert sum(int((cut_images == 0).sum()) for cut_images, _ in cut) > sum(
        int((plain_images == 0).sum()) for plain_images, _ in plain
    )


def test_num_workers_and_pin_memory_change_nothing_and_say_so(cifar, capsys):
    def first_batch(**options):
        module = CIFAR10DataModule(str(cifar), val_split=20, **options)
        module.setup("fit")
        return next(iter(module.train_dataloader()))

    plain = first_batch()
    assert capsys.readouterr().out == ""
    for options in ({"num_workers": 0}, {"num_workers": 7}, {"pin_memory": False}):
        assert all(
            torch.equal(plain_tensor, tensor)
            for plain_tensor, tensor in zip(plain, first_batch(**options), strict=True)
        )
        ((name, value),) = options.items()
        assert capsys.readouterr().out.startswith(
            f"warning: --data.{name}={str(value).lower()} is ignored: "
        )
    assert not torch.equal(plain[0], first_batch(seed=1)[0])


@pytest.mark.parametrize(
    ("normalize", "shuffle", "drop_last"),
    [(True, True, True), (False, True, True), (True, False, False)],
)
def test_the_loaders_are_what_the_settings_say(normalize, shuffle, drop_last):
    settings = {"batch_size": 7, "seed": 3, "drop_last": drop_last, "cutout": 2}
    settings["shuffle"] = shuffle
    module = ranks.Numbered(50, normalize=normalize, **settings)
    module.setup()
    conversion = Normalize(module.mean, module.std) if normalize else Normalize()
    expected = ResidentLoader(
        module.sets["train"],
        normalize=conversion,
        augment=True,
        flip=True,
        **settings,
    )
    for batch, expected_batch in zip(module.train_dataloader(), expected, strict=True):
        assert all(map(torch.equal, batch, expected_batch))
    whole = sum(labels_of(expected), []) == module.sets["train"].labels.tolist()
    assert whole is (not shuffle)  # in their order, too
    for split, evaluated in (("val", module.val_dataloader()), ("test", module.test_dataloader())):
        images, labels = map(torch.cat, zip(*evaluated, strict=True))
        assert torch.equal(images, conversion(module.sets[split].images))
        assert torch.equal(labels, module.sets[split].labels)


class Counted(ranks.Numbered):
    """Counts how often it is read."""

    def __init__(self, **options) -> None:
        super().__init__(50, **options)
        self.read = []

    def load(self, train: bool) -> tuple[np.ndarray, np.ndarray]:
        self.read.append(train)
        return super().load(train)


@pytest.mark.parametrize(
    ("stages", "read"),
    [
        (["fit", "validate", "fit"], [True]),
        (["validate", "fit"], [True]),
        (["test", "predict"], [False]),
        (["predict", "test"], [False]),
        ([None, "fit", "test", None], [True, False]),
    ],
)
def test_each_stage_reads_what_it_needs_and_nothing_is_read_twice(stages, read):
    module = Counted()
    for stage in stages:
        module.setup(stage)
    assert module.read == read
    assert list(module.sets) == ["train", "val"] * (True in read) + ["test"] * (False in read)


def test_the_first_rank_alone_says_that_a_setting_has_no_effect(capsys):
    for is_first in (False, True):
        module = Counted(num_workers=2)
        module.trainer = SimpleNamespace(is_global_zero=is_first, node_rank=0, num_nodes=1)
        module.setup("fit")
        assert ("--data.num_workers=2 is ignored" in capsys.readouterr().out) is is_first


def test_what_the_data_says_is_in_the_log_at_once(monkeypatch):
    """Even if the output is a file."""
    log = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log))
    module = Counted(pin_memory=True)
    module.setup("fit")
    assert log.getvalue().startswith(b"warning: --data.pin_memory=true is ignored")


def test_the_fingerprint_is_that_of_what_is_trained_and_validated_on():
    modules = [ranks.Numbered(50), ranks.Numbered(50), ranks.Numbered(50, seed=1)]
    modules += [ranks.Numbered(50, val_split=5), ranks.Numbered(51)]
    for module in modules:
        module.setup("fit")
    modules += [ranks.Numbered(50)]
    modules[-1].setup("fit")
    modules[-1].sets["val"].labels[3] += 1
    first, same, *others = [module.fingerprint for module in modules]
    assert first == same and len({first, *others}) == 1 + len(others)
    assert len(first) == 16 and int(first, 16) >= 0


def test_the_statistics_of_cifar_10_are_those_of_lightning_bolts():
    data = CIFAR10DataModule()
    assert data.mean == pytest.approx((0.49139, 0.48235, 0.44667), abs=1e-4)
    assert data.std == pytest.approx((0.24706, 0.24353, 0.26157), abs=1e-4)


def test_a_cat_may_be_mirrored_and_a_digit_may_not():
    assert CIFAR10DataModule().flip and not DigitsDataModule().flip


class Recorder(LightningModule):
    """Records the batches that Lightning gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch[1].tolist(), float(batch[0].sum())))
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(cifar, tmp_path, model, epochs, ckpt_path=None, **options):
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(
        model, CIFAR10DataModule(str(cifar), val_split=20, batch_size=32), ckpt_path=ckpt_path
    )
    return trainer


@pytest.mark.parametrize("limit", [None, 4, 0.5])
def test_lightning_sees_each_epochs_own_order_also_after_a_checkpoint(cifar, tmp_path, limit):
    options = {} if limit is None else {"limit_train_batches": limit}
    uninterrupted = Recorder()
    interrupted = Recorder()
    second = Recorder()
    fit(cifar, tmp_path, uninterrupted, 3, **options)
    assert uninterrupted.seen[0][1] != uninterrupted.seen[len(uninterrupted.seen) // 3][1]
    fit(cifar, tmp_path, interrupted, 1, **options).save_checkpoint(tmp_path / "one.ckpt")
    fit(cifar, tmp_path, second, 3, ckpt_path=tmp_path / "one.ckpt", **options)
    assert interrupted.seen + second.seen == uninterrupted.seen


def test_the_digits_are_the_same_images_for_every_seed_and_every_split_is_apart():
    module = DigitsDataModule(seed=7)
    module.setup()
    assert {name: len(split) for name, split in module.sets.items()} == {
        "train": 1294,
        "val": 143,
        "test": 360,
    }
    assert module.num_samples == 1294 and module.num_classes == 10 and module.dims == (3, 32, 32)
    pixels = torch.cat([split.images for split in module.sets.values()])
    assert len({image.numpy().tobytes() for image in pixels}) == 1797  # no image is in two splits
    images, labels = module.load(train=True)
    assert images.dtype == np.uint8 and labels.dtype == np.int64
    assert labels[:12].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5, 2, 8]
    assert module.sets["test"].labels[:12].tolist() == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1, 3, 7]
    points = images[:, :1, ::4, ::4]  # each is shown as 4x4 pixels of three equal colours
    assert (images.reshape(1437, 3, 8, 4, 8, 4) == points[:, :, :, None, :, None]).all()
    low, high = module.input_range
    assert (images.min() / 255, images.max() / 255) == (low, high) == (0, 1)
    assert module.mean == pytest.approx([images.mean() / 255] * 3, abs=1e-3)
    assert module.std == pytest.approx([images.std() / 255] * 3, abs=1e-3)


@pytest.mark.slow
def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    module = DigitsDataModule()
    reference = load_digits()
    all_images = np.concatenate([module.load(train)[0] for train in (True, False)])
    order = np.random.RandomState(0).permutation(1797)
    assert (all_images[:, 0, ::4, ::4] == (reference.images[order] * 255 // 16)).all()
    labels = np.concatenate([module.load(train)[1] for train in (True, False)])
    assert (labels == reference.target[order]).all()


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"val_split": 200}, "--data.val_split: found 200, expected 1 to 199"),
        ({"val_split": 0}, "--data.val_split"),
        ({"val_split": 1.5}, "--data.val_split"),
        ({"val_split": -0.1}, "--data.val_split"),
        ({"val_split": float("nan")}, "--data.val_split: found nan, expected"),
        ({"val_split": float("inf")}, "--data.val_split: found inf, expected"),
        ({"batch_size": 0}, "--data.batch_size: found 0, expected 1 or more"),
        ({"seed": -1}, "--data.seed: found -1, expected 0 or more"),
        ({"cutout": -1}, "--data.cutout: found -1, expected 0 or more"),
    ],
)
def test_a_wrong_setting_is_named(cifar, options, flag):
    with pytest.raises(UserError, match=flag):
        CIFAR10DataModule(str(cifar), **options).setup("fit")


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 1}, {"seed": 0}, {"cutout": 1}, {"val_split": 1}, {"val_split": 199}],
    ids=str,
)
def test_the_least_and_the_most_that_is_allowed(cifar, options):
    module = CIFAR10DataModule(str(cifar), **{"val_split": 20} | options)
    module.setup("fit")
    images, labels = next(iter(module.train_dataloader()))
    assert len(images) == len(labels) == min(module.batch_size, 200 - module.val_split)


def test_data_is_downloaded_if_that_is_asked_for(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr("app.cifar10_files.download", folders.append)
    monkeypatch.chdir(tmp_path)
    CIFAR10DataModule("cifar").prepare_data()
    assert folders == []
    CIFAR10DataModule("cifar", download=True).prepare_data()
    assert folders == [tmp_path / "cifar"]
    with pytest.raises(UserError, match=f"--data.data_dir=cifar: {tmp_path}/cifar holds no CIFAR"):
        CIFAR10DataModule("cifar").setup("fit")


def test_no_data_dir_says_what_to_do():
    with pytest.raises(UserError, match="channel `training`.*--data.data_dir"):
        CIFAR10DataModule().setup("fit")


# Lightning Bolts itself ---------------------------------------------------------------------------


# It runs in a process of its own: in this one, the name CIFAR10DataModule would mean two classes
# from then on.
BOLTS_SPLIT = """
import sys
import numpy as np
from torchvision.datasets import cifar
cifar.check_integrity = lambda path, md5: True  # the small set has other checksums
from pl_bolts.datamodules import CIFAR10DataModule
folder, val_split, seed, result = sys.argv[1:]
val_split = float(val_split) if "." in val_split else int(val_split)
data = CIFAR10DataModule(folder, val_split=val_split, seed=int(seed))
data.setup("fit")
train, val = data.dataset_train, data.dataset_val
arrays = {"images": train.dataset.data, "labels": train.dataset.targets}
np.savez(result, **arrays, train=train.indices, val=val.indices)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("val_split", "seed"), [(20, 0), (70, 42), (0.2, 42), (0.33, 0)])
def test_the_split_is_that_of_lightning_bolts(cifar, tmp_path, val_split, seed):
    arguments = [str(cifar), str(val_split), str(seed), str(tmp_path / "split.npz")]
    run = warm.run(["python", "-c", BOLTS_SPLIT, *arguments], tmp_path)
    assert run.returncode == 0, run.stdout
    expected = np.load(tmp_path / "split.npz")
    datamodule = CIFAR10DataModule(str(cifar), val_split=val_split, seed=seed)
    datamodule.setup("fit")
    for split in ("train", "val"):
        images = expected["images"][expected[split]].transpose(0, 3, 1, 2)
        assert torch.equal(datamodule.sets[split].images, torch.from_numpy(images))
        assert (
            datamodule.sets[split].labels.tolist() == expected["labels"][expected[split]].tolist()
        )


@pytest.mark.slow
def test_the_class_of_lightning_bolts_trains(tmp_path):
    write_cifar(tmp_path)
    program = (
        "from torchvision.datasets import cifar; "
        "cifar.check_integrity = lambda path, md5: True;"  # as above
        "from app.train import main; main()"
    )
    flags = [
        "--data=pl_bolts.datamodules.CIFAR10DataModule",
        f"--data.data_dir={tmp_path}",
        "--data.val_split=40",
    ]
    command = [
        "python",
        "-c",
        program,
        *flags,
        "--trainer.max_steps=2",
        "--trainer.accelerator=cpu",
    ]
    run = warm.run(command, tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stdout
    assert "test_acc=" in run.stdout
    assert (tmp_path / "output/model/model.pt").is_file()
