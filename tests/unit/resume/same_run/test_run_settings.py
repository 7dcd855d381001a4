"""resume/same_run/run_settings.py: whether a checkpoint is of this run, and what may change."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from sagemaker_lightning.resume.same_run import run_settings

BEFORE = {"sizes": [8, 32], "workers": [2, 0], "ranks": 2}


@pytest.mark.parametrize(
    ("flag", "before_value", "now_value", "ranks", "now", "allowed"),
    [
        ("--data.batch_size", 8, 4, 4, None, True),
        ("--data.batch_size", 8, 16, 1, None, True),
        ("--model.any_name", 32, 16, 4, None, True),
        ("--data.batch_size", 8, 4, 2, None, False),
        ("--data.batch_size", 8, 16, 4, None, False),
        ("--data.batch_size", 16, 8, 4, None, False),  # no loader had that one
        ("--data.share", 8, 4.0, 4, None, False),
        ("--trainer.max_epochs", 8, 4, 4, None, False),
        ("--data.batch_size", 8, 4, 4, {"sizes": [4, 16], "workers": [2, 0]}, True),
        ("--data.batch_size", 8, 4, 4, {"sizes": [4, 32], "workers": [2, 0]}, False),
        ("--data.workers", 2, 5, 2, None, True),
        ("--data.workers", 3, 5, 2, None, False),
        ("--data.workers", 2, 5, 2, {"sizes": [8, 32], "workers": [5, 0]}, True),
        ("--data.workers", 2, 5, 2, {"sizes": [8, 32], "workers": [2, 0]}, False),
    ],
)
def test_the_samples_of_all_ranks_batches_stay_as_many(
    flag, before_value, now_value, ranks, now, allowed
):
    changed = {flag: (before_value, now_value)}
    found = run_settings._allowed_loader_flags(changed, BEFORE, ranks, now)
    assert found == ({flag} if allowed else set())


def trainer_of(loader=None, model=None, datamodule=None, ranks: int = 1, nodes: int = 1):
    return SimpleNamespace(
        lightning_module=nn.Linear(2, 1) if model is None else model,
        train_dataloader=loader,
        datamodule=datamodule,
        world_size=ranks,
        num_nodes=nodes,
    )


def changed_flag(flag: str, other_settings: bool = False) -> list[str]:
    """Return what is said of a flag that was 1 and is 2."""
    trainer = trainer_of()
    before = run_settings.describe(trainer, {flag: 1})
    allowed = [True] if other_settings else []
    return run_settings.differences(trainer, {flag: 2}, before, *allowed)


@pytest.mark.parametrize(
    "flag",
    [
        "trainer.max_epochs",
        "trainer.min_steps",
        "trainer.devices",
        "trainer.num_nodes",
        "trainer.strategy",
        "trainer.sync_batchnorm",
        "trainer.inference_mode",
        "trainer.use_distributed_sampler",
        "trainer.enable_progress_bar",
        "trainer.log_every_n_steps",
        "trainer.num_sanity_val_steps",
        "trainer.limit_test_batches",
        "trainer.default_root_dir",
        "logger",
        "logger.name",
        "progress.every_n_seconds",
        "resume.keep",
        "config",
        "divergence",
        "lr_scaling",
        "checkpoint",
        "checkpoint.dirpath",
        "data.data_dir",
        "data.download",
        "data.num_workers",
        "model.workers",
        "data.pin_memory",
        "model.prefetch_factor",
    ],
)
def test_a_resumed_run_may_change(flag):
    assert changed_flag(f"--{flag}") == []


@pytest.mark.parametrize(
    "flag",
    [
        "trainer.accumulate_grad_batches",
        "trainer.limit_val_batches",
        "trainer.val_check_interval",
        "loggers",
        "checkpoint.monitor",
        "checkpoint.mode",
        "checkpoint.save_top_k",
        "data.data_dir_2",
        "data.size",
        "model.width",
        "optimizer.momentum",
        "seed_everything",
    ],
)
def test_a_resumed_run_may_not_change(flag):
    expected = [f"--{flag} was 1, is 2"]
    assert changed_flag(f"--{flag}") == changed_flag(f"--{flag}", other_settings=True) == expected


@pytest.mark.parametrize(
    "flag",
    [
        "optimizer.lr",
        "model.lr",
        "model.learning_rate",
        "trainer.gradient_clip_val",
        "trainer.gradient_clip_algorithm",
        "trainer.precision",
    ],
)
def test_a_resumed_run_may_change_if_it_is_allowed(flag):
    assert changed_flag(f"--{flag}") == [f"--{flag} was 1, is 2"]
    assert changed_flag(f"--{flag}", other_settings=True) == []
    assert len(changed_flag(f"--{flag}_2", other_settings=True)) == 1


def test_all_that_differs_is_named():
    """A flag that only one run has is another one."""
    trainer = trainer_of(datamodule=SimpleNamespace(fingerprint=lambda: "abc"))
    before = run_settings.describe(trainer, {"--b": 1, "--a": (2, 3), "--same": None})
    assert before["ranks"] == 1
    assert run_settings.differences(trainer, {"--b": 1, "--a": [2, 3]}, before) == []
    other = trainer_of(datamodule=SimpleNamespace(fingerprint="xyz"))
    lines = [
        "--a was [2, 3], is None",
        "--c was None, is 4",
        "the training data was abc, is xyz",
    ]
    assert run_settings.differences(other, {"--b": 1, "--c": 4}, before) == lines


def test_other_shapes_are_named():
    before = run_settings.shapes_of(nn.Linear(2, 1))
    assert before == {"weight": [1, 2], "bias": [1]}
    model = nn.Linear(3, 1, bias=False)
    model.register_buffer("mean", torch.zeros(()))
    assert run_settings.other_shapes(before, run_settings.shapes_of(model)) == [
        "the model's bias was [1], is absent",
        "the model's mean was absent, is []",
        "the model's weight was [1, 2], is [1, 3]",
    ]


def test_a_lazy_part_may_have_any_shape():
    lazy = run_settings.shapes_of(nn.Sequential(nn.LazyLinear(2)))
    made = run_settings.shapes_of(nn.Sequential(nn.Linear(3, 2)))
    assert lazy == {"0.weight": None, "0.bias": None}
    assert run_settings.other_shapes(lazy, made) == run_settings.other_shapes(made, lazy) == []


def test_what_identifies_the_data():
    data = SimpleNamespace(sharded=True, fingerprint="abc")
    described = run_settings.describe(trainer_of(datamodule=data, nodes=4), {})
    assert described["data"] == "4 parts"
    data.sharded = False
    assert run_settings.describe(trainer_of(datamodule=data), {})["data"] == "abc"
    assert run_settings.describe(trainer_of(), {})["data"] == "None"


def test_the_numbers_of_the_loaders_are_described():
    loaders = [DataLoader(range(8), 4, num_workers=2), DataLoader(range(8), batch_size=None), [1]]
    data = SimpleNamespace(batch_size=16)
    described = run_settings.describe(trainer_of(loaders, datamodule=data), {})
    assert described["sizes"] == [4, None, None, 16] and described["workers"] == [2, 0, None]
    data.batch_size = "8"
    assert run_settings.describe(trainer_of(datamodule=data), {})["sizes"] == [None]


def test_a_batch_size_that_no_loader_has_after_all_is_refused():
    """The loaders are there later than the flags."""
    flags = [{"--data.samples": 8, "--data.n": 2}, {"--data.samples": 4, "--data.n": 1}]
    before = run_settings.describe(trainer_of(DataLoader(range(8), 8, num_workers=2)), flags[0])
    loaders = {
        size_and_workers: trainer_of(
            DataLoader(range(8), size_and_workers[0], num_workers=size_and_workers[1]), ranks=2
        )
        for size_and_workers in ((4, 1), (8, 1), (4, 2))
    }
    assert run_settings.differences(loaders[4, 1], flags[1], before) == []
    found = [
        run_settings.loader_differences(trainer, flags[1], before) for trainer in loaders.values()
    ]
    assert found == [[], ["--data.samples was 8, is 4"], ["--data.n was 2, is 1"]]
    assert run_settings.loader_differences(loaders[8, 1], flags[0], before) == []


def test_flags_that_may_explain_a_difference():
    """Those of trainer, model and data, in order."""
    before = {"flags": '{"--model.b": 1, "--trainer.a": 1, "--data": "x", "--models.c": 1}'}
    now = {"--model.b": 2, "--trainer.a": 1, "--data": "y", "--models.c": 2, "--resume.keep": 3}
    assert run_settings.changed_settings(before, now) == [
        ("--data", "x", "y"),
        ("--model.b", "1", "2"),
    ]


def test_what_a_trainer_was_given_identifies_a_run():
    names = [
        "accumulate_grad_batches",
        "check_val_every_n_epoch",
        "gradient_clip_algorithm",
        "gradient_clip_val",
        "limit_train_batches",
        "limit_val_batches",
        "overfit_batches",
        "precision",
        "reload_dataloaders_every_n_epochs",
        "val_check_interval",
    ]
    given = {name: object() for name in names}
    trainer = SimpleNamespace(**given, max_epochs=3)
    assert run_settings.trainer_settings(trainer) == {
        f"--trainer.{name}": value for name, value in given.items()
    }
