"""resume/files/best_model.py: which models are written, kept and removed."""

from pathlib import Path

import pytest
import torch
from checkpoint_folders import fails_on_a_full_disk, flipped, state, without_ranks
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from sagemaker_lightning import ExactResume
from sagemaker_lightning.callbacks.divergence import Divergence
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.files.best_model import BestModel
from sagemaker_lightning.resume.files.checkpoint_file import CheckedIO, read, write


def test_no_model_is_removed_while_a_newer_one_could_not_be_written(tmp_path: Path, monkeypatch):
    files = CheckedIO(plain_values=True)
    paths = [tmp_path / f"{number}.ckpt" for number in range(3)]
    files.save_checkpoint({}, paths[0])
    monkeypatch.setattr(checkpoint_file, "write", fails_on_a_full_disk)
    files.save_checkpoint({}, paths[1])
    assert files.problem == f"{paths[1]} could not be written (No space left on device)"
    files.remove_checkpoint(paths[0])
    assert paths[0].exists()
    monkeypatch.undo()
    files.save_checkpoint({}, paths[2])
    assert files.problem == ""
    files.remove_checkpoint(paths[0])
    assert not paths[0].exists()


@pytest.mark.parametrize(
    ("filename", "warns"), [("{epoch}-{nope:.2f}", True), ("{epoch}-{loss}", False)]
)
def test_a_file_name_with_a_metric_that_is_not_logged_is_warned_of_once(
    tmp_path: Path, capsys, filename, warns
):
    best = BestModel(tmp_path, monitor="loss", filename=filename)
    metrics = {name: torch.tensor(1.0) for name in ("loss", "epoch", "step")}
    for _ in range(2):
        best.format_checkpoint_name(dict(metrics))
    line = (
        f"warning: the best model's filename {filename}: nope is not logged: 0 is used; logged "
        "metrics: epoch, loss, step\n"
    )
    assert capsys.readouterr().out == line * warns


class Improving(LightningModule):
    """Each epoch's model is the best so far."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.weight(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", -float(self.current_epoch))

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 1))

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of_four_epochs(*callbacks: Callback) -> Trainer:
    """Return a trainer that prints nothing and checks nothing first."""
    return Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize(("exact", "kept_while_training"), [(None, 1), (False, 1), (True, 3)])
def test_files_that_are_not_the_best_any_more(tmp_path: Path, exact, kept_while_training):
    """Only checkpoints to resume from need them."""
    seen = []

    class Count(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            seen.append(len(list((tmp_path / "best").glob("*.ckpt"))))

    best = BestModel(tmp_path / "best", monitor="val_loss")
    resume = [] if exact is None else [ExactResume(tmp_path / "run", exact=exact)]
    trainer_of_four_epochs(best, Count(), *resume).fit(Improving())
    assert seen == [0, 1, min(2, kept_while_training), kept_while_training]
    assert [str(path) for path in (tmp_path / "best").iterdir()] == [best.best_model_path]


class Found(Improving):
    """Each validation finds the next of some values; a hyperparameter is not a plain value."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.save_hyperparameters({"folder": Path("data")})
        self.values = values

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.values[self.current_epoch])


def test_a_best_model_that_could_not_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch, capfd
):
    """What a later epoch writes is the best again."""
    best = BestModel(tmp_path / "best", monitor="val_loss", filename="{epoch}")
    kept = []

    def write_or_fail(path: Path, *arguments) -> None:
        if path.name == "epoch=1.ckpt":
            fails_on_a_full_disk()
        write(path, *arguments)

    class Looks(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            kept.append(Path(best.best_model_path).name)

    monkeypatch.setattr(checkpoint_file, "write", write_or_fail)
    trainer_of_four_epochs(best, Looks(), ExactResume(tmp_path / "run")).fit(
        Found([3.0, 2.0, 5.0, 1.0])
    )
    assert kept == ["", "epoch=0.ckpt", "epoch=0.ckpt", "epoch=0.ckpt"]
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["epoch=3.ckpt"]
    assert best.best_model_score == 1.0
    assert read(tmp_path / "best/epoch=3.ckpt")["hyper_parameters"] == {"folder": "data"}
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert lines == [
        f"warning: training continues, but {tmp_path}/best/epoch=1.ckpt could not be written (No "
        f"space left on device); the best model is still {tmp_path}/best/epoch=0.ckpt"
    ]


def ranked(folder: Path, mode: str, *values: float) -> BestModel:
    """Return the callback that has written a model for each value, `epoch=N.ckpt`."""
    best = BestModel(folder, monitor="loss", mode=mode, save_top_k=-1, filename="{epoch}")
    trainer = without_ranks()
    trainer.callbacks = trainer.loggers = []
    trainer.save_checkpoint = lambda path, weights_only: Path(path).touch()
    for number, value in enumerate(values):
        trainer.global_step = number
        candidates = {"epoch": torch.tensor(number), "loss": torch.tensor(value)}
        best.write_ranked(torch.tensor(value), trainer, candidates)
    assert len(best.best_k_models) == len(values)
    return best


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("mode", "values", "name"),
    [
        ("min", (NAN, 0.5, -INF), "epoch=1.ckpt"),
        ("max", (NAN, 0.5, INF), "epoch=1.ckpt"),
        ("min", (NAN, NAN), ""),
        ("max", (INF,), ""),
    ],
)
def test_a_model_with_a_metric_that_is_not_a_number_is_written_and_is_never_the_best(
    tmp_path, mode, values, name
):
    best = ranked(tmp_path, mode, *values)
    assert Path(best.best_model_path).name == name
    assert best.best_model_score == (0.5 if name else None)
    assert len(list(tmp_path.iterdir())) == len(values)


def test_a_model_that_has_diverged_replaces_no_file(tmp_path: Path):
    model = LightningModule()
    model.weight = torch.nn.Parameter(torch.tensor([NAN]))
    trainer = without_ranks()
    trainer.callbacks = [Divergence()]
    trainer.lightning_module, trainer.precision, trainer.global_step = model, "32-true", 4
    trainer.save_checkpoint = pytest.fail
    with pytest.raises(UserError, match="weights are NaN or infinite after step 4"):
        BestModel(tmp_path, monitor="loss").write(trainer, str(tmp_path / "best.ckpt"))


def test_a_file_is_removed_when_no_checkpoint_may_refer_to_it(tmp_path: Path):
    best = BestModel(tmp_path, monitor="loss", save_top_k=2)
    trainer = without_ranks(removed := [])
    best.discard(trainer, "a.ckpt")
    assert removed == ["a.ckpt"] and best.files() == []
    best.keep_retired(True)
    best.discard(trainer, "b.ckpt")
    for _ in range(2):
        best.remove_outdated(trainer, keep=2)
    assert removed == ["a.ckpt"] and best.files() == [Path("b.ckpt")]
    best.remove_outdated(trainer, keep=2)
    assert removed == ["a.ckpt", "b.ckpt"] and best.files() == []
    for path in ("c.ckpt", "d.ckpt"):
        best.discard(trainer, path)
    best.best_model_path = "c.ckpt"  # these are the best again
    best.best_k_models = {"d.ckpt": torch.tensor(1.0), "s3://bucket/e.ckpt": torch.tensor(1.0)}
    best.remove_outdated(trainer, keep=0)
    assert removed == ["a.ckpt", "b.ckpt"] and not best.retired
    assert sorted(best.files()) == [Path("c.ckpt"), Path("d.ckpt")]


@pytest.mark.parametrize(
    ("save_top_k", "value", "is_best"),
    [(1, 1.0, True), (1, NAN, False), (1, INF, False), (-1, NAN, True)],
)
def test_a_model_is_one_of_the_best_if_its_metric_is_a_number(tmp_path, save_top_k, value, is_best):
    best = BestModel(tmp_path, monitor="loss", save_top_k=save_top_k)
    assert best.check_monitor_top_k(without_ranks(), torch.tensor(value)) is is_best


def test_a_model_that_a_checkpoint_refers_to_is_looked_for(tmp_path: Path):
    """In the folder of this run, wherever the run that saved it had its own."""
    best = BestModel(tmp_path, monitor="loss")
    assert best.state_key == "sagemaker_lightning.best_model monitor=loss mode=min"  # for ever
    write(tmp_path / "best.ckpt", state(1))

    def problem(**entries) -> str:
        write(tmp_path / "step.ckpt", entries, 1, 1)
        return best.missing_file(tmp_path / "step.ckpt")

    callback = {"best_model_path": "/before/best.ckpt", "dirpath": "/before"}
    assert problem(callbacks={best.state_key: callback}) == ""
    flipped(tmp_path / "best.ckpt")
    assert problem(callbacks={best.state_key: callback}) == (
        "best.ckpt, the best model, which is damaged: its checksum does not match"
    )
    (tmp_path / "best.ckpt").unlink()
    assert problem(callbacks={best.state_key: callback}) == (
        "best.ckpt, the best model, which is missing"
    )
    callback = {"best_model_path": ""}
    assert problem() == problem(callbacks={best.state_key: callback}) == ""


def test_the_model_with_the_best_metric_is_read(tmp_path: Path):
    for mode, chosen_name in (("max", "3.ckpt"), ("min", "1.ckpt")):
        best = BestModel(tmp_path, monitor="score", mode=mode, save_top_k=3)
        for number in (2, 3, 1):
            write(tmp_path / f"{number}.ckpt", state(number))
            best.best_k_models[str(tmp_path / f"{number}.ckpt")] = torch.tensor(float(number))
        assert best.choose_intact() == str(tmp_path / chosen_name)


def test_a_best_model_is_read_only_if_it_is_whole(tmp_path: Path, capsys):
    """Otherwise the next best one is read, if there is one.

    A file that another program has written is read if torch can read it.
    """
    best = BestModel(tmp_path, monitor="loss", save_top_k=3)
    names = [str(tmp_path / f"best-{number}.ckpt") for number in range(3)]
    for number, name in enumerate(names):
        write(Path(name), state(number))
        best.best_k_models[name] = torch.tensor(float(number))
    best.best_model_path = names[0]
    assert best.choose_intact() == names[0] and capsys.readouterr().out == ""
    content = bytearray(Path(names[0]).read_bytes())
    content[300] ^= 1
    Path(names[0]).write_bytes(content)
    assert best.choose_intact() == names[1]
    damaged = f"warning: {names[0]}, the best model, is damaged: its checksum does not match"
    assert capsys.readouterr().out == f"{damaged}; {names[1]} is written in its place\n"
    Path(names[1]).write_bytes(Path(names[1]).read_bytes()[:-100])  # cut off
    torch.save(state(2), names[2])
    assert best.choose_intact() == names[2]
    Path(names[2]).unlink()
    assert best.choose_intact() == ""
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == (
        f"warning: {names[2]}, the best model, is missing; the last one is written in its place"
    )
