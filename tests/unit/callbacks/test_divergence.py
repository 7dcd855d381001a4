"""callbacks/divergence.py: a NaN or infinite loss fails the job at its step.

No good checkpoint is replaced.
"""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
from foreign import Model

from sagemaker_lightning.callbacks.divergence import LOSSES_PER_READ, Divergence, divergence_of
from sagemaker_lightning.cli import run
from sagemaker_lightning.contract.errors import UserError

from app import train

FLAGS = ["--model=diverging.Diverging", "--trainer.max_epochs=2", "--trainer.accelerator=cpu"]
NAN = math.nan
INF = math.inf
QUIET = ["--trainer.enable_model_summary=false", "--system.every_n_seconds=1000"]


@pytest.fixture
def fit(tmp_path: Path, monkeypatch, capfd):
    """Return a function that trains with flags in a folder.

    It returns the output, and the exit status if that is above 0.
    """
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "support"))
    monkeypatch.chdir(tmp_path)

    def fit(*flags: str) -> tuple[str, int]:
        status = 0
        try:
            train.main([*FLAGS, *QUIET, *flags])
        except SystemExit as leaving:
            status = leaving.code
        return "".join(capfd.readouterr()), status

    return fit


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("output/data/checkpoints/*.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--model.how=loss"],
        ["--model.how=dict"],
        ["--model.manual=true"],
        ["--model.manual=true", "--model.returns=false"],
        ["--trainer.accumulate_grad_batches=2", "--trainer.max_epochs=3"],
        [
            "--checkpoint.monitor=null",
            "--checkpoint.every_n_train_steps=1",
            "--trainer.enable_checkpointing=true",
        ],
    ],
    ids=" ".join,
)
def test_a_loss_that_is_infinite_fails_the_job_at_its_step(fit, tmp_path: Path, flags):
    output, status = fit(*flags)
    assert status == 1 and "Traceback" not in output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: the loss is inf at step 5; the last finite loss was 0.7")
    assert (
        "at step 4; try a lower learning rate, --trainer.gradient_clip_val=1, "
        "or look for NaN in the data"
    ) in error
    assert not (tmp_path / "output/model/model.json").exists()
    assert not [name for name in checkpoints(tmp_path) if "5" in name]


@pytest.mark.slow
def test_with_another_learning_rate_the_run_continues_from_before(fit, tmp_path: Path):
    flags = [
        "--model.how=rate",
        "--resume.every_n_steps=1",
        "--optimizer=SGD",
        "--lr_scheduler=StepLR",
    ]
    flags += ["--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5"]
    output, status = fit(*flags, "--optimizer.lr=0.1")
    assert status == 1 and "at step 5 the learning rate is 0.1" in output
    output, status = fit(*flags, "--optimizer.lr=0.02")
    assert status == 1 and "--optimizer.lr was 0.1, is 0.02" in output
    assert "--resume.other_settings=true allows another learning rate" in output
    output, status = fit(
        *flags, "--optimizer.lr=0.02", "--lr_scheduler.gamma=0.1", "--resume.other_settings=true"
    )
    # Otherwise the flag would be accepted and ignored.
    assert status == 1 and "--lr_scheduler.gamma was 0.5, is 0.1" in output
    output, status = fit(*flags, "--optimizer.lr=0.02", "--resume.other_settings=true")
    assert status == 0 and "resuming from step 4" in output
    assert "at step 5 the learning rate is 0.02" in output
    last = max((tmp_path / "output/data/checkpoints").glob("step-*.ckpt"))
    state = torch.load(last, weights_only=True)
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.02 * 0.5**2)


@pytest.mark.slow
def test_what_is_not_a_divergence(fit):
    """A skipped batch is not a divergence; with the user's flag, no loss is one.

    What is written then is JSON all the same.
    """
    assert fit("--model.how=none")[1] == 0
    output, status = fit("--divergence.fail=false", "--resume.dirpath=other")
    assert status == 0 and "val_loss=nan" in output

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    described = json.loads(Path("output/model/model.json").read_text(), parse_constant=refuse)
    assert described["metrics"]["val_loss"] is None


def diverge_on_a_rank(flags: list[str]) -> None:
    sys.argv = ["train.py"]
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
    train.main([*FLAGS, *QUIET, "--trainer.strategy=ddp", *flags])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag", ["--resume.every_n_steps=1", "--trainer.enable_checkpointing=false"]
)
def test_all_ranks_fail_alike_where_one_diverges(tmp_path: Path, flag):
    """Rank 1's loss is infinite, and so are all weights from the next step on.

    No rank hangs, and all say the same.
    """
    ended = ranks.run(
        diverge_on_a_rank, ["--model.rank=1", "--model.step=3", flag], folder=tmp_path
    )
    assert [rank.error for rank in ended] == ["SystemExit: 1"] * 2
    errors = [re.findall("^error: (.*) \\[host", rank.output, re.MULTILINE) for rank in ended]
    assert errors[0] == errors[1] and len(errors[0]) == 1
    assert errors[0][0].startswith("the loss is inf at step 3; ")


class OnGPU(torch.Tensor):
    """A loss that is on a GPU: reading it would mean waiting for the GPU."""

    is_cpu = False
    is_cuda = True

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        assert (device, non_blocking) == ("cpu", True)
        return self.as_subclass(torch.Tensor)


def test_a_gpu_is_not_waited_for_at_each_step(monkeypatch):
    """Losses are read when the GPU has copied them, and it copies many at once."""
    events = []

    class Event:
        """The end of what the GPU had to do when it was recorded."""

        is_recorded = is_over = False

        def __init__(self) -> None:
            events.append(self)

        def record(self) -> None:
            self.is_recorded = True

        def query(self) -> bool:
            return self.is_recorded and self.is_over

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watched = Divergence()
    for step in range(1, 2 * LOSSES_PER_READ):
        watched.losses.append((step, torch.tensor(1.0 / step).as_subclass(OnGPU)))
        assert not watched.poll()
        assert len(events) == (step >= LOSSES_PER_READ) and watched.last_finite is None
    events[0].is_over = True
    watched.poll()
    assert watched.last_finite == (LOSSES_PER_READ, pytest.approx(1 / LOSSES_PER_READ))
    assert len(watched.losses) == LOSSES_PER_READ - 1 and len(events) == 1


def test_losses_on_their_way_from_a_gpu_are_waited_for_before_a_checkpoint_only():
    waits = []
    event = SimpleNamespace(query=lambda: len(waits) > 1, synchronize=lambda: waits.append(1))
    watched = Divergence()
    watched.being_copied = [1, 2], torch.tensor([0.5, math.inf]), event
    watched.losses = [(3, torch.tensor(1.0))]
    assert not watched.poll() and len(watched.losses) == 1  # a second copy waits for the first
    with pytest.raises(UserError, match="the loss is inf at step 2; the last finite loss was 0.5"):
        watched.check(trainer_with())
    assert waits == [1] and not watched.losses and watched.being_copied is None
    watched = Divergence()
    watched.being_copied = [1], torch.tensor([math.nan]), event
    waits.append(1)
    assert watched.poll() and watched.first_not_finite[0] == 1


def trainer_with(module: torch.nn.Module | None = None, **options) -> SimpleNamespace:
    """Return what the callback asks a trainer for."""
    module = module or torch.nn.Linear(1, 1)
    module.automatic_optimization = True
    settings = {"lightning_module": module, "global_step": 4, "world_size": 1, "callbacks": []}
    settings |= {"accumulate_grad_batches": 1, "precision": "32-true", "precision_plugin": None}
    return SimpleNamespace(**settings | options)


def step(watched: Divergence, trainer: SimpleNamespace, outputs) -> None:
    watched.on_train_batch_start(trainer, trainer.lightning_module, None, 0)
    watched.on_train_batch_end(trainer, trainer.lightning_module, outputs, None, 0)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_rank_fails_within_the_step(shape):
    watched = Divergence()
    with pytest.raises(UserError, match="^the loss is nan at step 5; there was no finite loss bef"):
        step(watched, trainer_with(), torch.full(shape, math.nan))
    watched = Divergence()
    step(watched, trainer_with(world_size=2), torch.full(shape, math.nan))
    with pytest.raises(UserError, match="nan at step 5"):  # at the next step that all agree on
        watched.check(trainer_with(world_size=2))


def test_a_loss_among_other_outputs_is_watched():
    watched = Divergence()
    step(watched, trainer_with(), {"loss": torch.tensor(0.5), "other": torch.tensor(math.nan)})
    with pytest.raises(UserError, match="nan at step 5; the last finite loss was 0.5, at step 5"):
        step(watched, trainer_with(), {"loss": torch.tensor(math.nan)})


def test_a_loss_of_manual_optimization_is_said_as_it_is():
    """Lightning divides no loss of it by the number of batches that are accumulated."""
    trainer = trainer_with(accumulate_grad_batches=4)
    trainer.lightning_module.automatic_optimization = False
    watched = Divergence()
    watched.losses = [(1, torch.tensor(3.0)), (2, torch.tensor(NAN))]
    with pytest.raises(UserError, match="the last finite loss was 3, at step 1"):
        watched.check(trainer)


@pytest.mark.parametrize(("precision", "bf16"), [("16-mixed", True), ("32-true", False)])
def test_bf16_is_a_remedy_for_what_half_precision_cannot_hold(precision, bf16):
    watched = Divergence()
    watched.losses = [(step, torch.tensor(value)) for step, value in enumerate((1.0, NAN, 2.0), 1)]
    with pytest.raises(UserError) as caught:
        watched.check(trainer_with(precision=precision, accumulate_grad_batches=4))
    says = "the loss is nan at step 2; the last finite loss was 4, at step 1; "
    assert str(caught.value).startswith(says)
    assert ("--trainer.precision=bf16-mixed, or look" in str(caught.value)) == bf16


def test_the_scale_of_mixed_precision_is_no_part_of_the_loss():
    trainer = trainer_with()
    trainer.lightning_module.automatic_optimization = False
    scaler = SimpleNamespace(scale=lambda value: value * 1024)
    trainer.precision_plugin = SimpleNamespace(scaler=scaler)
    watched = Divergence()
    watched.on_before_backward(trainer, trainer.lightning_module, torch.tensor(2048.0))
    assert watched.losses == [(0, torch.tensor(2.0))]


@pytest.mark.parametrize("manual", [False, True])
def test_a_loss_is_kept_once_and_not_at_all_if_none_fails(manual):
    for fail, kept in ((True, 1), (False, 0)):
        trainer = trainer_with(world_size=2)
        trainer.lightning_module.automatic_optimization = not manual
        watched = Divergence(fail)
        watched.being_copied = [], torch.tensor([]), SimpleNamespace(query=lambda: False)
        watched.on_before_backward(trainer, trainer.lightning_module, torch.tensor(1.0))
        step(watched, trainer, None if manual else torch.tensor(1.0))
        assert len(watched.losses) == kept


def module_of(*parameters: torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weights = torch.nn.ParameterList(parameters)
    return module


def test_weights_that_are_not_trained_or_not_there_may_be_anything():
    parameter = torch.nn.Parameter
    frozen = parameter(torch.tensor(NAN), requires_grad=False)
    other = [parameter(torch.empty(0)), parameter(torch.ones(1, dtype=torch.complex64))]
    for parameters in ([], [frozen], other, [frozen, *other, parameter(torch.ones(2))]):
        Divergence().check(trainer_with(module_of(*parameters)))
    spoilt = [parameter(torch.ones(2)), parameter(torch.tensor([1.0, -math.inf]))]
    with pytest.raises(UserError, match="^weights are NaN or infinite after step 4; there was no"):
        Divergence().check(trainer_with(module_of(*spoilt)))


def test_a_trainer_without_the_callback_never_fails():
    trainer = trainer_with(module_of(torch.nn.Parameter(torch.tensor(math.nan))))
    divergence_of(trainer).check(trainer)
    trainer.callbacks = [object(), watched := Divergence()]
    assert divergence_of(trainer) is watched


@pytest.mark.parametrize(("first", "warnings"), [(True, 1), (False, 0)])
def test_one_rank_warns_of_a_metric(capsys, first, warnings):
    trainer = trainer_with(sanity_checking=False, is_global_zero=first, current_epoch=2)
    trainer.callback_metrics = {"val_loss": torch.tensor(math.nan), "val_acc": torch.tensor(0.5)}
    Divergence().on_validation_end(trainer, None)
    says = "warning: val_loss=nan in the validation of epoch 3, step 4; no model becomes the best"
    assert capsys.readouterr().out.count(says) == warnings


class Validating(Model):
    """A model whose loss is finite, with a val_loss for each epoch that the test sets.

    Args:
        found: val_loss of each epoch.
    """

    def __init__(self, found: list[float] = ()) -> None:
        super().__init__()
        self.found = found

    def validation_step(self, batch, batch_idx):
        value = math.nan if self.trainer.sanity_checking else self.found[self.current_epoch]
        self.log("val_loss", torch.tensor(float(value)))
        self.log("val_acc", 0.5)


VALIDATING = [
    "--model=test_divergence.Validating",
    "--data=foreign.Data",
    "--checkpoint.filename={epoch}",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "warned", "best"),
    [
        ([NAN, 0.5, NAN, 0.6], "nan in the validation of epoch 1, step 8", "epoch=1.ckpt"),
        ([0.5, -INF, 0.6], "-inf in the validation of epoch 2, step 16", "epoch=0.ckpt"),
        ([NAN, NAN], "nan in the validation of epoch 1, step 8", ""),
        ([0.5, 0.4], "", "epoch=1.ckpt"),
    ],
)
def test_a_validation_that_finds_no_number(fit, monkeypatch, found, warned, best):
    """There is one warning, no model becomes the best, and what is written is JSON.

    With other modes and numbers of models: unit/resume/files/test_best_model.py.
    """
    chosen = []
    export = run.export

    def noted(cli, environment) -> None:
        chosen.append(Path(cli.config_init.checkpoint.best_model_path).name)
        export(cli, environment)

    monkeypatch.setattr(run, "export", noted)
    values = ", ".join(str(value).replace("nan", ".nan").replace("inf", ".inf") for value in found)
    output, status = fit(
        *VALIDATING, f"--trainer.max_epochs={len(found)}", f"--model.found=[{values}]"
    )
    assert status == 0, output
    lines = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert len(lines) == bool(warned) and all(
        line.startswith(f"warning: val_loss={warned}; ") for line in lines
    )
    assert chosen == [best]
    described = json.loads(Path("output/model/model.json").read_text(), parse_constant=pytest.fail)
    value = described["metrics"]["val_loss"]
    assert value == pytest.approx(found[-1]) if math.isfinite(found[-1]) else value is None
