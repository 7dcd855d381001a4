"""ExactResume's arguments, and what is refused beside it: one line each."""

import copy
import inspect
import os
import pickle
from pathlib import Path

import pytest
import pytorch_lightning as pl
import ranks
import torch
from containers import ROOT
from lightning_utilities.core.rank_zero import rank_zero_only
from own_fits import Untested, short_trainer
from own_trainer import Classifier, Noisy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sagemaker_lightning
from sagemaker_lightning import (
    ExactResume,
    RankConsistency,
    SageMakerEnvironment,
    UserError,
    make_deterministic,
)
from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.resume import first_draws


@pytest.mark.slow
def test_hosts_find_each_other(tmp_path: Path, monkeypatch):
    """Without our launcher; what the user or torchrun has set stays."""
    for name in ("MASTER_ADDR", "NODE_RANK"):  # restored after the test
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setenv("MASTER_PORT", "12345")
    monkeypatch.setenv("SM_CURRENT_HOST", "localhost")
    monkeypatch.setenv("SM_HOSTS", '["127.0.0.1", "localhost"]')
    sagemaker_lightning.join_hosts()
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and os.environ["MASTER_PORT"] == "12345"
    assert os.environ["NODE_RANK"] == "1"
    monkeypatch.setenv("SM_HOSTS", '["localhost", "no-such-host.invalid"]')
    monkeypatch.setenv("SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT", "1")
    resume = ExactResume(tmp_path)  # waits for nobody
    options = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "logger": False}
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # the trainer sets it
    trainer = pl.Trainer(**options, callbacks=[resume])
    with pytest.raises(UserError, match="^host no-such-host.invalid: its name did not resolve"):
        resume.run_begins(trainer)


def test_a_second_one_is_refused(tmp_path: Path):
    with pytest.raises(
        UserError,
        match=r"^Trainer\(callbacks=...\): found two ExactResume, for .*; expected one$",
    ):
        short_trainer(tmp_path / "a", ExactResume(tmp_path / "b")).fit(Classifier())


def test_what_it_has_itself_is_refused_beside_it(tmp_path: Path):
    with pytest.raises(
        UserError, match="found RankConsistency beside ExactResume, which has one of its own"
    ):
        short_trainer(tmp_path, RankConsistency()).fit(Classifier())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"keep": 0}, r"ExactResume\(keep=...\): found 0, expected 1 or more"),
        (
            {"keep": 0, "settings": {"--resume.keep": 0}},
            "--resume.keep: found 0, expected 1 or more",
        ),
        (
            {"every_n_minutes": float("nan")},
            r"ExactResume\(every_n_minutes=...\): found nan, expected 0 or more",
        ),
        ({"seed": "42"}, r"ExactResume\(seed=...\): found '42', expected an integer"),
        (
            {"every_n_steps": 1.5},
            r"ExactResume\(every_n_steps=...\): found 1.5, expected an integer",
        ),
        ({"dirpath": None}, r"ExactResume\(dirpath=...\): found None, expected a folder"),
        ({"settings": ["a"]}, r"ExactResume\(settings=...\): found \['a'\], expected a dict"),
        (
            {"dirpath": "s3://bucket/x"},
            r"ExactResume\(dirpath=...\): found s3://bucket/x, expected a folder",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(tmp_path: Path, arguments, says):
    with pytest.raises(UserError, match=f"^{says}"):
        ExactResume(**{"dirpath": tmp_path} | arguments)


def test_the_pages_name_the_defaults():
    parameters = inspect.signature(ExactResume).parameters
    page = (ROOT / "docs/flags-and-recipes.md").read_text()
    for name in ("every_n_minutes", "keep"):
        assert f"`{name}` ({parameters[name].default:g})" in page
    assert "`exact` (true)" in page and parameters["exact"].default is True
    off = ("every_n_steps", "other_settings", "strict")
    assert not any(parameters[name].default for name in off)


def test_a_drill_sets_where_checkpoints_are(tmp_path: Path):
    environment = SageMakerEnvironment(drill={"steps": 2}, checkpoint_dir=tmp_path / "drill")
    resume = ExactResume(tmp_path / "own", environment=environment)
    assert resume.folder.path == tmp_path / "drill"


@pytest.mark.parametrize(("seed", "is_random"), [(2**32, False), (2**32 + 1, True)])
def test_a_seed_of_a_program_is_distinguished_from_torchs_first_one(
    tmp_path: Path, seed, is_random
):
    model = Untested()
    torch.manual_seed(seed)
    ExactResume(tmp_path, seed=1)
    assert (model in first_draws._unseeded) is is_random


def test_a_seed_decides_what_is_drawn_after_it_unless_the_command_line_has_set_it(tmp_path: Path):
    drawn = {}
    for seed in (1, 1, 2):
        ExactResume(tmp_path, seed=seed)
        assert drawn.setdefault(seed, torch.get_rng_state().tolist()) == (
            torch.get_rng_state().tolist()
        )
    assert drawn[1] != drawn[2]
    ExactResume(tmp_path)
    ExactResume(tmp_path, seed=1, stop=shutdown.Stop(CheckpointHome(tmp_path), print))
    assert torch.get_rng_state().tolist() == drawn[2]


class OwnShare(torch.utils.data.Sampler):
    """Draws every second batch, as rank 0 or rank 1 has to."""

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        rank = int(os.environ["RANK"])
        return iter([range(4 * batch, 4 * batch + 4) for batch in range(rank, 10, 2)])


class Stream(IterableDataset):
    """Yields the same samples on all ranks."""

    def __iter__(self):
        yield from map(Noisy().__getitem__, range(20))


def fit_two_ranks(loader_name: str) -> str:
    """Train with a loader whose samples Lightning does not distribute over the ranks."""
    loaders = {
        "own": lambda: DataLoader(Noisy(), batch_sampler=OwnShare()),
        "stream": lambda: DataLoader(Stream(), 4),
    }
    options = {"use_distributed_sampler": False} if loader_name == "own, as it is" else {}
    trainer = short_trainer(Path("run"), devices=2, strategy="ddp", **options)
    trainer.fit(Untested(), loaders[loader_name.partition(",")[0]]())
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader_name", "says"),
    [
        (
            "own",
            "Trainer(use_distributed_sampler=...): found True, and OwnShare, which draws other "
            "samples on each rank; give use_distributed_sampler=False",
        ),
        ("own, as it is", ""),
        ("stream", "warning: all 2 ranks train on the same batch: they share"),
    ],
)
def test_who_shares_the_samples_out_is_said(tmp_path: Path, loader_name, says):
    """Each sample once, or a line on it."""
    ended = ranks.run(fit_two_ranks, loader_name, folder=tmp_path)
    if loader_name == "own":
        assert all(says in rank.error for rank in ended), ended[0].output
    else:
        assert not ended[0].error and not ended[1].error, ended[0].output
        assert ended[0].output.count("warning: ") == bool(says) and says in ended[0].output


def test_a_copy_is_one_of_its_own(tmp_path: Path):
    """Some users make callbacks once, and copy them for each trainer."""
    resume = ExactResume(tmp_path, seed=3, keep=5)
    trainer = short_trainer(tmp_path / "a")
    trainer.fit(Classifier())
    used = [entry for entry in trainer.callbacks if isinstance(entry, ExactResume)]
    for original in (resume, *used):
        copied = copy.deepcopy(original)
        assert copied.seeding is not original.seeding and copied.folder.path == original.folder.path
        assert copied.arguments == original.arguments
    resume = ExactResume(tmp_path, stop=shutdown.Stop(CheckpointHome(tmp_path), print))
    assert copy.deepcopy(resume).stop is resume.stop and resume.resumes == []


def test_a_callback_is_pickled_with_its_arguments(tmp_path: Path):
    """A library may save the callbacks beside a model, and read them again (darts does)."""
    resume = ExactResume(tmp_path, seed=3, keep=5)
    trainer = short_trainer(tmp_path / "a")
    trainer.fit(Classifier())
    used = [entry for entry in trainer.callbacks if isinstance(entry, ExactResume)]
    for original in (resume, *used):
        pickled = pickle.dumps(original)
        state = torch.get_rng_state()
        read = pickle.loads(pickled)
        assert torch.equal(torch.get_rng_state(), state)
        assert type(read) is ExactResume and read.arguments == original.arguments


def test_a_loader_is_deterministic_without_a_trainer():
    def drawn(seed: int, epoch: int, batch: int = 0, workers: int = 0) -> list:
        data = TensorDataset(torch.arange(20))
        loader = make_deterministic(DataLoader(data, 4, shuffle=True, num_workers=workers), seed)
        loader.begin_epoch(epoch, batch)
        return [batch[0].tolist() for batch in loader]

    assert drawn(7, 1) == drawn(7, 1, workers=1) != drawn(7, 2) and drawn(7, 1) != drawn(8, 1)
    assert drawn(7, 1, 2) == drawn(7, 1)[2:]
    loader = make_deterministic(DataLoader(TensorDataset(torch.arange(20)), 4, shuffle=True), 7)
    first_batches = [batch[0].tolist() for batch in loader]
    assert [
        batch[0].tolist() for batch in make_deterministic(loader, 8)
    ] != first_batches  # another seed counts
    with pytest.raises(
        UserError, match="^make_deterministic: an IterableDataset has no positions; expected"
    ):
        make_deterministic(DataLoader(iter_only()), 7)


def iter_only():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    return Stream()
