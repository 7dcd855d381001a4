"""Progress as log lines: what a line says, how often it comes, and on which rank."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from containers import ROOT
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning.callbacks import progress
from sagemaker_lightning.callbacks.progress import LogProgress
from sagemaker_lightning.launcher import job_request

LINE = re.compile(
    r"epoch=(\d+)/2 step=(\d+)/(\d+) train_loss=\d\.\d+ train_acc=[01](?:\.\d+)? "
    r"(val_loss=\d+\.\d+ val_acc=[01](?:\.\d+)? )?images/s=\d+(?:\.\d+)? left=\d:\d\d:\d\d"
)


class Small(LightningModule):
    """Logs what the example's model logs; its epochs have four batches of 32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 10)

    def step(self, name: str, batch) -> torch.Tensor:
        images, labels = batch
        scores = self.layer(images)
        loss = torch.nn.functional.cross_entropy(scores, labels)
        accuracy = (scores.argmax(1) == labels).float().mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_acc": accuracy})
        return loss

    def training_step(self, batch, batch_idx):
        return self.step("train", batch)

    def validation_step(self, batch, batch_idx):
        self.step("val", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(128, 4), torch.arange(128) % 10), 32)

    val_dataloader = train_dataloader


def train(tmp_path, capsys, every_n_seconds: float, **settings) -> list[str]:
    """Train two epochs of four steps, and return the lines that were printed."""
    trainer = Trainer(
        default_root_dir=tmp_path,
        callbacks=[LogProgress(every_n_seconds)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "limit_val_batches": 1} | settings,
    )
    capsys.readouterr()
    trainer.fit(Small())
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch=")]


@pytest.mark.slow
def test_a_line_after_each_validation(tmp_path, capsys):
    lines = train(tmp_path, capsys, every_n_seconds=1000)
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    assert [match.group(1, 2, 3) for match in matches] == [("1", "4", "8"), ("2", "8", "8")]
    assert all(match[4] for match in matches)
    assert lines[-1].endswith("left=0:00:00")


@pytest.mark.slow
def test_a_line_whenever_the_seconds_are_over(tmp_path, capsys):
    steps = [
        re.search(r"step=(\d+)", line)[1] for line in train(tmp_path, capsys, every_n_seconds=0)
    ]
    assert steps == ["1", "2", "3", "4", "4", "5", "6", "7", "8", "8"]


@pytest.mark.slow
def test_the_rate_counts_images_and_time_left_counts_steps(tmp_path, capsys, monkeypatch):
    """Here each reading of the clock moves it on by one second."""
    clock = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = train(tmp_path, capsys, every_n_seconds=2)
    for line in lines:
        # There are two steps between two lines, and each step reads the clock once.
        images = 32 * 2
        seconds = 2
        if "val_loss" not in line:
            assert f"images/s={images / seconds:.6g} " in line
    # The clock was read at the start (0, 1), at the epoch's start (2), after step 1 (3), after step
    # 2 (4) and for `left` (5).
    assert lines[0].endswith(f"left=0:00:{round(5 / 2 * 6)}")


def test_the_rate_is_that_of_all_ranks(capsys, monkeypatch):
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 7.0))
    trainer = SimpleNamespace(
        world_size=3, current_epoch=0, max_epochs=1, global_step=2, callback_metrics={}
    )
    trainer.estimated_stepping_batches = 4
    trainer.is_global_zero = True
    log = LogProgress(2.0)
    log.on_train_start(trainer, None)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 9.0))
    log.on_train_batch_end(trainer, None, None, torch.zeros(5, 2), 0)
    assert "images/s=7.5 " in capsys.readouterr().out  # 5 images on each of 3 ranks in 2 seconds


def test_the_time_left_of_a_resumed_run_is_that_of_its_own_rate(capsys, monkeypatch):
    clock = SimpleNamespace(now=7.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    trainer = SimpleNamespace(
        world_size=1, current_epoch=4, max_epochs=None, global_step=100, callback_metrics={}
    )
    trainer.estimated_stepping_batches = 160
    trainer.is_global_zero = True
    log = LogProgress(1.0)
    log.on_train_start(trainer, None)
    for clock.now, trainer.global_step, left in (
        (9.0, 100, "unknown"),  # gradients accumulate
        (11.0, 102, "0:01:56"),  # 4 seconds for 2 steps, and 58 to come
        (13.0, 160, "0:00:00"),
    ):
        log.on_train_batch_end(trainer, None, None, torch.zeros(5, 2), 0)
        line = f"epoch=5 step={trainer.global_step}/160 images/s=2.5 left={left}\n"
        assert capsys.readouterr().out == line
    clock.now = 20.0
    log.on_train_epoch_start(trainer, None)  # a validation has taken 7 seconds
    clock.now = 21.0
    log.on_train_batch_end(trainer, None, None, torch.zeros(5, 2), 0)
    assert "images/s=5 " in capsys.readouterr().out


def test_a_validation_has_a_line_with_its_metrics(capsys, monkeypatch):
    """What has no known end has none in the line."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 7.0))
    trainer = SimpleNamespace(
        current_epoch=0,
        max_epochs=-1,
        global_step=5,
        is_global_zero=True,
        sanity_checking=False,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        estimated_stepping_batches=float("inf"),
        callback_metrics={},
    )
    log = LogProgress()
    log.on_train_start(trainer, None)
    trainer.callback_metrics["train_loss"] = torch.tensor(0.5)
    log.on_validation_start(trainer, None)
    trainer.callback_metrics["val_loss"] = torch.tensor(0.12345678)
    log.on_validation_end(trainer, None)
    metrics = "train_loss=0.5 val_loss=0.123457"
    assert capsys.readouterr().out == f"epoch=1 step=5 {metrics} left=unknown\n"


class Names(LightningModule):
    """Logs small values, and names of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.log("error", 1.39e-10 * (self.global_step + 1))
        self.log("loss of epoch", float(self.current_epoch), on_step=False, on_epoch=True)
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        self.log("error", -2e-8)
        self.log("mIoU/a\nb", float("nan"))

    def on_train_epoch_end(self):
        self.log("last", 7.0 + self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(2, 1)))

    val_dataloader = train_dataloader


class Looks(progress.Callback):
    """Looks at the metrics, as ModelCheckpoint and EarlyStopping do."""

    def on_validation_end(self, trainer, *_):
        assert trainer.callback_metrics


def test_every_logged_name_is_printed(tmp_path, capsys):
    """A value of a validation is in its line alone; the last line has what the last epoch's end
    has brought.
    """
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(
        default_root_dir=tmp_path,
        callbacks=[LogProgress(0), Looks()],
        accelerator="cpu",
        enable_model_summary=False,
        max_epochs=2,
        **options,
    )
    trainer.fit(Names())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch=")]
    assert [re.sub("(images/s|left).*", "", line) for line in lines] == [
        "epoch=1/2 step=1/4 error=1.39e-10 ",
        "epoch=1/2 step=2/4 error=2.78e-10 ",
        r"epoch=1/2 step=2/4 error=-2e-08 mIoU/a\nb=nan ",
        "epoch=2/2 step=3/4 error=4.17e-10 loss of epoch=0 last=7 ",
        "epoch=2/2 step=4/4 error=5.56e-10 loss of epoch=0 last=7 ",
        r"epoch=2/2 step=4/4 error=-2e-08 mIoU/a\nb=nan loss of epoch=0 last=7 ",
        "epoch=2/2 step=4/4 loss of epoch=1 last=8 ",
    ]


def expressions(name: str) -> list[str]:
    """Return the regular expressions for a metric that are given anywhere, with this name."""
    request = json.loads((ROOT / "examples/spot.json").read_text())
    definitions = request["AlgorithmSpecification"]["MetricDefinitions"]
    page = (ROOT / "docs/clients.md").read_text()
    given = [job_request.METRICS["val_loss"], definitions[0]["Regex"]]
    given += re.findall(r'"Regex": r"(.*val_loss=.*)"', page)
    assert len(given) == 3
    return [expression.replace("val_loss", name) for expression in given]


@pytest.mark.parametrize(
    "value", [0.0334, 0.0, 1.0, 2e-8, 1.39e-10, -1.39e-10, 5e-324, 123456.0, 1e20, -1e300]
)
def test_a_metric_definition_takes_what_is_printed(value):
    texts = progress.texts({"error": 7.0, "val_error": value, "my_val_error": 8.0})
    line = " ".join(f"{name}={text}" for name, text in texts.items())
    for expression in expressions("val_error"):
        (text,) = re.findall(expression, line)
        assert float(text) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_metric_definition_takes_a_value_that_is_not_a_number(value):
    line = f"error={progress.texts({'error': float(value)})['error']} left=unknown"
    assert all(re.findall(each, line) == [value] for each in expressions("error"))


def test_a_validation_beside_a_training_has_no_line(capsys):
    trainer = SimpleNamespace(sanity_checking=False, state=SimpleNamespace(fn=TrainerFn.VALIDATING))
    LogProgress().on_validation_end(trainer, None)
    trainer = SimpleNamespace(sanity_checking=True, state=SimpleNamespace(fn=TrainerFn.FITTING))
    LogProgress().on_validation_end(trainer, None)
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_epochs_shorter_than_the_interval_and_no_validation(tmp_path, capsys, monkeypatch):
    """The same clock: a step takes a second, and an epoch is one step."""
    clock = iter(range(1000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    lines = train(tmp_path, capsys, 3, max_epochs=9, limit_train_batches=1, limit_val_batches=0)
    assert [re.search(r"step=(\d+)", line)[1] for line in lines] == ["3", "6", "9"]


@pytest.mark.slow
def test_without_a_known_end_the_time_left_is_unknown(tmp_path, capsys):
    trainer = Trainer(
        default_root_dir=tmp_path,
        callbacks=[LogProgress(0), StopAfter(2)],
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Small())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch=")]
    assert re.fullmatch(
        r"epoch=1 step=1 train_loss=\S+ train_acc=\S+ images/s=\S+ left=unknown", lines[0]
    )


class StopAfter(progress.Callback):
    """Ends the training after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer, *_) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


@pytest.mark.slow
def test_ranks_other_than_zero_print_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "is_global_zero", False)
    assert not train(tmp_path, capsys, every_n_seconds=0)
