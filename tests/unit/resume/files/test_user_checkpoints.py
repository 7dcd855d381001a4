"""resume/files/user_checkpoints.py: the files that a ModelCheckpoint of the user's writes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import without_ranks
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint

from sagemaker_lightning.compat.lightning_checkpoints import (
    NewestSaved,
    newest_saved,
    set_newest_saved,
)
from sagemaker_lightning.resume.files import user_checkpoints
from sagemaker_lightning.resume.files.best_model import BestModel


def test_a_checkpoint_names_no_file_outside_of_its_folder(tmp_path: Path, monkeypatch):
    """The state may be forged. A URL is not a path below the working directory.

    test_loading_forged.py resumes trainings with such states.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    here = BestModel(tmp_path / "here", monitor="loss", save_top_k=3)
    there = BestModel(tmp_path / "there", monitor="loss", save_top_k=3)
    own_name = str(tmp_path / "there/epoch=0-step=9.ckpt")
    foreign_names = [
        str(tmp_path / "code.ckpt"),
        str(tmp_path / "there/../code.ckpt"),
        str(tmp_path / "there/code.py"),
        "s3://bucket/code.ckpt",
        5,
    ]
    for foreign_name in foreign_names:
        forged = there.state_dict() | {
            name: foreign_name
            for name in ("best_model_path", "kth_best_model_path", "last_model_path")
        }
        forged["best_k_models"] = {path: torch.tensor(1.0) for path in (own_name, foreign_name)}
        forged["retired"] = {foreign_name: 9, own_name: 9}
        here.load_state_dict(forged)
        moved_name = str(tmp_path / "here/epoch=0-step=9.ckpt")
        assert here.retired == {moved_name: 9} and [*here.best_k_models] == [moved_name]
        assert here.best_model_path == here.last_model_path == ""
        assert here.kth_best_model_path == moved_name  # one of those that are known
    on_s3 = BestModel("s3://bucket/run", monitor="loss")
    kept = {"retired": {"s3://bucket/run/epoch=0-step=9.ckpt": 0}}
    on_s3.load_state_dict(on_s3.state_dict() | kept)
    assert on_s3.retired == kept["retired"]


def test_what_was_saved_last_is_known(tmp_path):
    """The path is one of the callback's own: Lightning may link to it."""

    def of(*callbacks: ModelCheckpoint) -> SimpleNamespace:
        return SimpleNamespace(checkpoint_callbacks=[*callbacks])

    there = ModelCheckpoint(tmp_path / "there", monitor="loss")
    set_newest_saved(there, NewestSaved(9, str(tmp_path / "there/epoch=0-step=9.ckpt"), True))
    saved = user_checkpoints.last_saved(of(there, BestModel(tmp_path, monitor="loss")))
    assert saved == {there.state_key: (9, "epoch=0-step=9.ckpt", True)}
    here = ModelCheckpoint(tmp_path / "here", monitor="loss")
    for at, name, known in (
        (9, "epoch=0-step=9.ckpt", (9, str(tmp_path / "here/epoch=0-step=9.ckpt"), True)),
        (9, "../code.ckpt", (9, "", True)),
        (9, "code.py", (9, "", True)),
        (10, "epoch=0-step=10.ckpt", (0, "", False)),
        (-1, "", (0, "", False)),
    ):
        set_newest_saved(here, NewestSaved(0, "", False))
        user_checkpoints.set_last_saved(of(here), {here.state_key: (at, name, True)}, step=9)
        assert newest_saved(here) == known


@pytest.mark.parametrize(
    ("options", "names", "others"),
    [
        ({}, ["epoch=0-step=9.ckpt", "epoch=12-step=3-v1.ckpt"], ["best.ckpt", "last.ckpt"]),
        ({"save_last": True}, ["last.ckpt", "last-v2.ckpt"], ["last-model.ckpt", "Last.ckpt"]),
        (
            {"filename": "best-{epoch:03d}-{val/loss:.2e}"},
            ["best-epoch=004-val/loss=1.25e-03.ckpt", "best-epoch=004-val/loss=nan-v1.ckpt"],
            ["best-epoch=004-val/loss=a.ckpt", "best-epoch=4.ckpt", "val/loss=1.ckpt"],
        ),
        (
            {"filename": "{epoch}", "auto_insert_metric_name": False},
            ["0.ckpt", "-1.5.ckpt", "12-v3.ckpt"],
            ["pretrained.ckpt", "0.pt", "v1.ckpt"],
        ),
        (
            {"filename": "{epoch}-{loss}-{step}", "auto_insert_metric_name": False},
            ["1-2e+5-3.ckpt", "1-True-3-v2.ckpt", "---.ckpt"],
            ["-" * 10_000 + "a.ckpt", "1-2e-3.ckpt.ckpt", "1-2f5-3.ckpt"],
        ),
        ({"filename": "best"}, ["best.ckpt", "best-v1.ckpt"], ["best-of-all.ckpt", "best1.ckpt"]),
    ],
)
def test_files_are_removed_that_have_a_name_that_the_callback_gives(
    tmp_path, options, names, others
):
    """Others may be those of somebody else, though a checkpoint names them."""
    best = BestModel(tmp_path, monitor="loss", **options)
    trainer = without_ranks(removed := [])
    paths = [f"{tmp_path}/{name}" for name in (*names, *others)]
    best.load_state_dict(best.state_dict() | {"retired": dict.fromkeys(paths, 9)})
    best.remove_outdated(trainer, keep=0)
    assert sorted(removed) == sorted(paths[: len(names)]) and best.files() == []
    best.discard(trainer, "named by this run.ckpt")
    assert removed[-1] == "named by this run.ckpt"


def test_what_was_written_after_the_checkpoint_is_written_again_once(tmp_path: Path):
    callback = ModelCheckpoint(tmp_path / "mine")
    others = [ModelCheckpoint(), ModelCheckpoint(tmp_path / "none"), Callback()]
    trainer = without_ranks()
    trainer.checkpoint_callbacks = [callback, *others]
    (tmp_path / "mine").mkdir()
    for name in ("b.ckpt", "a.ckpt", "notes.txt", "step-000000004.ckpt"):
        (tmp_path / "mine" / name).touch()
    names = user_checkpoints.file_names(trainer)
    assert names == {callback.state_key: ["a.ckpt", "b.ckpt"]}
    (tmp_path / "mine/c.ckpt").touch()
    trainer.is_global_zero = False  # rank 0 decides
    user_checkpoints.overwrite_later_files(trainer, names)
    trainer.is_global_zero = True
    exists = lambda name: callback.file_exists(str(tmp_path / "mine" / name), trainer)  # noqa: E731
    assert exists("c.ckpt")
    user_checkpoints.overwrite_later_files(trainer, names)
    assert user_checkpoints.file_names(trainer) == names  # a checkpoint before c.ckpt is new
    assert [exists(name) for name in ("a.ckpt", "c.ckpt", "c.ckpt", "d.ckpt")] == [
        True,
        False,
        True,
        False,
    ]
    assert user_checkpoints.file_names(trainer)[callback.state_key] == [
        "a.ckpt",
        "b.ckpt",
        "c.ckpt",
    ]
    user_checkpoints.overwrite_later_files(trainer, {})  # the callback is a new one
    assert not exists("a.ckpt") and exists("a.ckpt")
