"""resume/check/verification.py in one process: what a rank records, compares and says."""

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher

from sagemaker_lightning.compat.lightning_loops import steps_done
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume import moments
from sagemaker_lightning.resume.agreement import Comparison
from sagemaker_lightning.resume.check import journal, verification
from sagemaker_lightning.resume.check.journal import FETCHED_AHEAD, Step
from sagemaker_lightning.resume.check.verification import Difference, ResumeCheck
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import batch_digest


class Fake:
    """An object with some attributes."""

    def __init__(self, **values) -> None:
        vars(self).update(values)


def trainer_at(
    epoch: int = 0, batch: int = 0, step: int = 0, rank: int = 0, ranks: int = 1
) -> Fake:
    """Return what a ResumeCheck asks of a trainer."""
    loop = Fake(
        _data_fetcher=None,
        epoch_progress=Fake(current=Fake(processed=epoch)),
        epoch_loop=Fake(
            batch_progress=Fake(current=Fake(processed=batch)),
            val_loop=Fake(),
            automatic_optimization=Fake(optim_progress=Fake(optimizer_steps=step)),
            manual_optimization=Fake(optim_step_progress=Fake(total=Fake(completed=0))),
        ),
    )
    return Fake(
        fit_loop=loop,
        global_rank=rank,
        world_size=ranks,
        is_global_zero=rank == 0,
        optimizers=[],
        callbacks=[],
        loggers=[],
        lr_scheduler_configs=[],
        lightning_module=LightningModule(),
        datamodule=None,
        train_dataloader=None,
        val_dataloaders=None,
        strategy=Fake(root_device=torch.device("cpu")),
    )


class Ranks:
    """One rank's ResumeCheck, and what the other ranks say whenever they exchange something."""

    def __init__(self, folder, at=(0, 0, 0), rank=0, ranks=1, strict=False, keep=3) -> None:
        self.folder = folder
        self.trainer = trainer_at(*at, rank, ranks)
        self.others = lambda value: []
        self.proof = ResumeCheck(
            self.trainer,
            Fake(path=folder, keep=keep),
            lambda value: [value, *self.others(value)],
            strict,
        )

    def begin(self, resumes: bytes = b"", flags=(), **entries) -> ResumeCheck:
        known = {
            "journal": resumes,
            "world_size": self.trainer.world_size,
            "step": steps_done(self.trainer),
            "run": {"flags": "{}"},
        }
        self.proof.start(known | entries if resumes else {}, dict(flags), comparable=True)
        return self.proof

    def train(self, *losses: float, batches_per_step: int = 1) -> None:
        """Train on a batch for each loss; the batch is its number."""
        current = self.trainer.fit_loop.epoch_loop.batch_progress.current
        for loss in losses:
            self.proof.begin_batch(torch.tensor([current.processed]), current.processed)
            self.proof.end_batch(torch.tensor(loss))
            current.processed += 1
            progress = self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
            progress.optimizer_steps += current.processed % batches_per_step == 0

    def new_epoch(self) -> None:
        self.trainer.fit_loop.epoch_loop.batch_progress.current.processed = 0
        self.trainer.fit_loop.epoch_progress.current.processed += 1

    @property
    def steps(self) -> list[Step]:
        """What the file of the journal has."""
        self.proof.journal.write()
        return journal.read(self.folder, self.proof.run_id, 0, self.trainer.world_size)[0]

    @property
    def positions(self) -> list[tuple[int, int]]:
        return [step.position for step in self.steps]


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """Close the journals that a test opens."""
    opened = []
    start_file = journal.Journal.start_file
    monkeypatch.setattr(
        journal.Journal,
        "start_file",
        lambda self, known: (opened.append(self), start_file(self, known))[1],
    )
    yield
    for each in opened:
        each.close()


def interrupted(folder, *losses: float, **options) -> bytes:
    """Train on some batches, and return the run's name."""
    run = Ranks(folder)
    run.begin()
    run.train(*losses, **options)
    run.proof.close()
    return run.proof.run_id


def resumed(folder, run_id: bytes, at=(0, 2, 2), **options) -> Ranks:
    """Return the run that continues from a checkpoint."""
    run = Ranks(folder, at, **options)
    run.begin(run_id)
    return run


def said(run: Ranks) -> str:
    (result,) = run.proof.results
    return result["said"]


def test_steps_that_are_repeated_are_counted(tmp_path, capsys):
    run_id = interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3, 0.4)
    run = resumed(tmp_path, run_id)
    assert run.proof.run_id == run_id and run.proof.results == []
    assert run.proof.comparison is Comparison.OPEN
    assert [step.position for step in run.proof.expected] == [(0, 2), (0, 3), (0, 4)]
    run.train(0.2)
    assert said(run) == "the next step is that of the interrupted run, bit for bit"
    run.train(0.3, 0.4)
    assert run.proof.comparison is Comparison.IDENTICAL
    run.train(7.0)
    run.proof.finish()
    words = "the next 3 steps are those of the interrupted run, bit for bit"
    assert run.proof.results == [{"step": 2, "identical": True, "steps": 3, "said": words}]
    assert capsys.readouterr().out == f"resumed at step 2: {words}\n"
    assert run.proof.journal.descriptor is None
    assert run.positions == [(0, batch) for batch in range(6)]


def test_the_first_step_of_a_run_counts_like_the_others(tmp_path):
    """A run may have been stopped before it."""
    run = resumed(tmp_path, interrupted(tmp_path, 0.0, 0.1), at=(0, 0, 0))
    run.train(0.0, 0.1)
    assert run.proof.results[0]["steps"] == 2


def test_several_batches_of_a_step_are_one_step(tmp_path):
    run_id = interrupted(tmp_path, *(float(batch) for batch in range(6)), batches_per_step=2)
    run = resumed(tmp_path, run_id, at=(0, 2, 1))
    run.train(2.0, 3.0, 4.0, 5.0, batches_per_step=2)
    assert run.proof.results[0]["steps"] == 2


def test_the_results_of_earlier_interruptions_come_first(tmp_path):
    run = resumed(tmp_path, interrupted(tmp_path, 0.0, 0.1, 0.2))
    earlier = {"step": 1, "identical": None, "steps": 0, "said": "the state is as it was saved"}
    # A checkpoint is input: its text is printed.
    run.proof.continue_results(
        [earlier | {"said": "a\nb"}, {"step": 2}, earlier | {"step": "3"}, 4]
    )
    assert run.proof.results == [earlier | {"said": r"a\nb"}]
    run.train(0.2)
    assert [result["step"] for result in run.proof.results] == [1, 2]
    run.proof.report()
    assert [result["step"] for result in run.proof.results] == [1, 2]


def test_another_loss_is_the_first_difference(tmp_path, capsys):
    """From there on, the run is another one: its journal has no step of the old one."""
    run = resumed(tmp_path, interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5))
    run.train(0.2, 7.0)
    assert run.proof.comparison is Comparison.DIFFERENT
    words = (
        "step 4 is not that of the interrupted run: on rank 0, the loss differs; likely because of "
        "state that no checkpoint holds, or a kernel that is not deterministic; the run may end "
        "with other weights"
    )
    run.train(8.0)
    run.proof.report_difference()
    assert capsys.readouterr().out == f"warning: resumed at step 2: {words}\n"
    assert run.proof.results == [{"step": 2, "identical": False, "steps": 1, "said": words}]
    assert run.positions == [(0, batch) for batch in range(5)] and not run.proof.expected
    run.train(9.0)
    run.proof.report_difference()
    run.proof.finish()
    assert capsys.readouterr().out == "" and len(run.proof.results) == 1
    again = resumed(tmp_path, run.proof.run_id)
    again.train(0.2, 7.0, 8.0, 9.0)
    assert again.proof.results[0]["steps"] == 4


def test_strict_keeps_the_steps_that_are_compared(tmp_path, capsys):
    run_id = interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3, 0.4)
    for _ in range(2):
        run = resumed(tmp_path, run_id, strict=True)
        run.train(0.2, 7.0, 8.0)
        says = r"^--resume\.strict: resumed at step 2: step 4 is not that of"
        with pytest.raises(UserError, match=says):
            run.proof.report_difference()
        run.proof.close()
    assert capsys.readouterr().out == ""
    run = resumed(tmp_path, run_id, strict=True)
    run.train(0.2, 0.3, 0.4)
    run.proof.finish()
    assert run.proof.results[0]["steps"] == 3
    assert capsys.readouterr().out.startswith("resumed at step 2: the next 3 steps are")


def test_a_longer_or_shorter_epoch_is_reported(tmp_path):
    run_id = interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3)
    run = resumed(tmp_path, run_id)
    run.train(0.2)
    run.new_epoch()
    run.train(0.9)
    assert (
        "on rank 0, only the interrupted run had batch 3 of epoch 0 (an epoch has another length); "
        "likely because of something in the data" in said(run)
    )
    first = Ranks(tmp_path)
    first.begin()
    first.train(0.0, 0.1, 0.2)
    first.new_epoch()
    first.train(0.3)
    first.proof.close()
    run = resumed(tmp_path, first.proof.run_id)
    run.train(0.2, 0.3)
    assert "the interrupted run did not have it (an epoch has another length)" in said(run)


def test_what_the_journal_has_lost_is_not_compared(tmp_path):
    """Steps after those are."""
    for third, says in ((0.4, "the next step is that of"), (9.9, "step 5 is not that of")):
        run_id = interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3, 0.4)
        file = journal.Journal(tmp_path, run_id, 0, 1, "")
        file.start_file(journal.read(tmp_path, run_id, 0, 1)[0][4:])
        file.close()
        run = resumed(tmp_path, run_id)
        run.train(7.0, 8.0, third)
        assert said(run).startswith(says)
        run.proof.close()


def test_a_run_that_begins_before_its_checkpoint_is_another_one(tmp_path):
    run = resumed(tmp_path, interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3))
    run.trainer.fit_loop.epoch_loop.batch_progress.current.processed = 1
    run.train(0.1)
    assert "the interrupted run did not have it (an epoch has another length)" in said(run)


def test_only_steps_of_the_same_run_with_as_many_ranks_are_compared(tmp_path):
    run_id = interrupted(tmp_path, 0.0, 0.1, 0.2)
    run = Ranks(tmp_path, (0, 2, 2))
    run.proof.start(
        {"journal": run_id, "world_size": 1, "step": 2, "run": {"flags": "{}"}}, {}, False
    )
    assert not run.proof.is_open and not run.proof.expected and run.proof.run_id == run_id
    run_id = interrupted(tmp_path, 0.0, 0.1, 0.2)
    run = Ranks(tmp_path, (0, 2, 2))
    run.begin(run_id, world_size=2)
    assert not run.proof.is_open and not run.proof.expected
    run.train(7.0)
    run.proof.finish()
    assert run.proof.results == []


@pytest.mark.parametrize("name", [b"short", None])
def test_a_run_without_a_name_gets_one(tmp_path, name):
    run = Ranks(tmp_path, (0, 2, 2), ranks=2)
    run.others = lambda value: [bytes(16)]
    run.proof.start({"journal": name, "world_size": 2, "step": 2, "run": {"flags": "{}"}}, {}, True)
    assert len(run.proof.run_id) == 16 and run.proof.run_id not in (name, bytes(16))


def test_steps_that_draw_batches_themselves_are_not_compared(tmp_path):
    run = Ranks(tmp_path, (0, 9, 2))
    run.trainer.fit_loop._data_fetcher = object.__new__(_DataLoaderIterDataFetcher)
    run.trainer.fit_loop._combined_loader = Fake(drawn=2)
    run.begin(interrupted(tmp_path, 0.0, 0.1, 0.2))
    assert run.proof.is_open and not run.proof.expected and not run.proof.expected_ahead
    assert run.positions == [(0, 0), (0, 1), (0, 2)]


def test_a_damaged_journal_is_reported(tmp_path, capsys):
    run_id = interrupted(tmp_path, 0.0, 0.1, 0.2)
    (tmp_path / "journal-0.bin").write_bytes(b"x")
    resumed(tmp_path, run_id)
    assert capsys.readouterr().out == (
        f"warning: {tmp_path}/journal-0.bin is damaged, or no journal of this program; later steps "
        "are not compared with it\n"
    )


# State that is restored ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "flags", "says"),
    [
        (
            ["a"],
            {},
            "a differs; likely because of a renamed attribute, or a hook that sets it again",
        ),
        (["a", "b", "c"], {}, "a, b, c differ; likely"),
        (list("abcdefghijklmnopqrstu"), {}, "r, s, t (and 1 more) differ; likely"),
        (
            ["the length of train.0.dataset"],
            {},
            "on rank 0, the length of train.0.dataset differs; likely because of data that were "
            "read or drawn again, and are others; the run",
        ),
        (["the numbers in train.0.dataset"], {}, "the numbers in train.0.dataset differ; likely"),
        (["the length of train.0.dataset", "a"], {}, "differ; likely because of data that were"),
        (
            ["a"],
            {"--model.a": 1, "--model.b": 2, "--model.c": 3, "--model.d": 4},
            "a differs; likely because of --model.a, which was None and is 1, or --model.b, which "
            "was None and is 2, or --model.c, which was None and is 3; the run",
        ),
    ],
)
def test_state_that_differs_is_reported_with_its_cause(tmp_path, capsys, names, flags, says):
    """The old run's steps after the checkpoint count no more."""
    run = Ranks(tmp_path, (0, 2, 2))
    run.begin(interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3), flags)
    of_data = "data that were read or drawn again, and are others"
    whys = {name: of_data if name.startswith("the length") else "" for name in names}
    run.proof.check_restored(whys)
    output = capsys.readouterr().out
    assert output.startswith(
        "warning: resumed at step 2: the state is not that of the interrupted run: on rank 0, "
    )
    assert says in output
    assert run.proof.results[0]["identical"] is False and run.positions == [(0, 0), (0, 1)]


def test_state_that_is_restored_is_no_result_yet(tmp_path, capsys):
    run = resumed(tmp_path, interrupted(tmp_path, 0.0, 0.1, 0.2))
    run.proof.check_restored({})
    run.proof.finish()  # such as if nothing is left to train
    assert run.proof.results == [] and capsys.readouterr().out == ""
    new = Ranks(tmp_path)
    new.begin()
    new.proof.check_restored({"a": ""})
    assert new.proof.difference is None and new.proof.results == []


def test_another_rank_may_have_found_the_difference(tmp_path, capsys):
    """The first one of all counts; and of steps and batches, what all ranks have."""
    run = resumed(tmp_path, interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3), ranks=1)
    run.train(0.2, 0.3)
    late, early = (Difference((0, 5 - rank), rank, 6 - rank, "x", "y") for rank in (1, 2))
    run.others = lambda value: (
        [Comparison.DIFFERENT] * 2
        if isinstance(value, Comparison)
        else [(1, True, late), (2, True, early)]
    )
    run.proof.report_difference()
    assert (
        "warning: resumed at step 2: step 4 is not that of the interrupted run: on rank 2, x; "
        "likely because of y;" in capsys.readouterr().out
    )
    assert run.proof.results[0]["steps"] == 1


@pytest.mark.parametrize("others", [True, False])
def test_all_ranks_have_to_have_got_the_announced_batch(tmp_path, monkeypatch, others):
    run_id = stopped(tmp_path, monkeypatch, ResumePoint.VALIDATION)
    run = resumed(tmp_path, run_id)
    run.train(0.2)
    run.others = lambda value: [(0, others, None)]
    run.proof.report()
    assert run.proof.results[0]["identical"] is (True if others else None)


def test_other_ranks_than_the_first_say_nothing(tmp_path, capsys):
    first = Ranks(tmp_path, rank=1, ranks=2)
    first.begin()
    first.train(0.0, 0.1, 0.2)
    first.proof.close()
    run = resumed(tmp_path, first.proof.run_id, rank=1, ranks=2)
    run.others = lambda value: []
    run.train(0.2)
    run.proof.finish()
    assert run.proof.results[0]["identical"] and capsys.readouterr().out == ""


# The batch that is to come ------------------------------------------------------------------------


def stopped(folder, monkeypatch, point, upcoming=2, ahead=(3,)) -> bytes:
    """Train two steps, and stop before a batch; Lightning has fetched another one ahead."""
    run = Ranks(folder)
    run.begin()
    run.train(0.0, 0.1)

    def next_batch(trainer):
        if upcoming is None:
            raise StopIteration
        return torch.tensor([upcoming])

    monkeypatch.setattr(moments, "next_batch", next_batch)
    run.trainer.fit_loop._data_fetcher = fetched(*ahead)
    run.trainer.optimizers = [Fake(param_groups=[{"lr": 0.5}])]
    run.proof.finish(point)
    return run.proof.run_id


def fetched(*numbers: int) -> Fake:
    return Fake(batches=[(torch.tensor([number]), 0, 0) for number in numbers])


@pytest.mark.parametrize(
    ("point", "upcoming", "ahead", "positions"),
    [
        (ResumePoint.BATCH, 2, (3,), [(0, 2), (0, 3)]),
        (ResumePoint.BATCH, 2, (), [(0, 2)]),
        (ResumePoint.BATCH, None, (3,), []),
        (ResumePoint.VALIDATION, 2, (3,), [(0, 2)]),
        (ResumePoint.EPOCH, 2, (3,), []),
        (None, 2, (3,), []),
    ],
)
def test_what_a_stop_records_of_the_next_batches(
    tmp_path, monkeypatch, point, upcoming, ahead, positions
):
    run_id = stopped(tmp_path, monkeypatch, point, upcoming, ahead)
    steps = journal.read(tmp_path, run_id, 0, 1)[0][2:]
    assert [step.position for step in steps] == positions
    assert [step.step for step in steps] == [3] * len(steps)
    assert [step.loss for step in steps] == [0, FETCHED_AHEAD][: len(steps)]
    rate = batch_digest.combine([batch_digest.combine([batch_digest.float_bits(0.5)])])
    expected_rate = rate if point is ResumePoint.BATCH else 0
    assert [step.rates for step in steps] == [expected_rate, 0][: len(steps)]


def test_a_stop_leaves_the_steps_that_an_earlier_run_has_trained(tmp_path, monkeypatch):
    """It was killed; the run that is stopped has not come as far."""
    run_id = interrupted(tmp_path, 0.0, 0.1, 0.2, 0.3, 0.4)
    before = journal.read(tmp_path, run_id, 0, 1)[0]
    run = resumed(tmp_path, run_id)
    run.train(0.2)
    monkeypatch.setattr(moments, "next_batch", lambda trainer: torch.tensor([3]))
    run.trainer.fit_loop._data_fetcher = fetched(4)
    run.proof.finish(ResumePoint.BATCH)
    assert journal.read(tmp_path, run_id, 0, 1)[0] == before


def test_the_announced_batch_is_the_one_that_comes(tmp_path, monkeypatch, capsys):
    """The end of a validation may have changed the learning rates."""
    run_id = stopped(tmp_path, monkeypatch, ResumePoint.VALIDATION)
    run = resumed(tmp_path, run_id)
    run.trainer.optimizers = [Fake(param_groups=[{"lr": 0.25}])]
    run.train(0.2)
    run.proof.finish()
    words = "the state is as it was saved, and the next batch is the expected one, bit for bit"
    assert run.proof.results == [{"step": 2, "identical": True, "steps": 0, "said": words}]
    assert capsys.readouterr().out == f"resumed at step 2: {words}\n"


def test_nothing_is_known_of_what_was_to_come(tmp_path, capsys):
    run = resumed(tmp_path, interrupted(tmp_path, 0.0, 0.1))
    run.train(0.2)
    run.proof.finish()
    words = (
        "the state is as it was saved; the interrupted run recorded no later step to compare with"
    )
    assert run.proof.results == [{"step": 2, "identical": None, "steps": 0, "said": words}]
    assert capsys.readouterr().out == f"resumed at step 2: {words}\n"


def test_another_batch_than_the_announced_one_is_reported(tmp_path, monkeypatch):
    run_id = stopped(tmp_path, monkeypatch, ResumePoint.VALIDATION, upcoming=7)
    run = resumed(tmp_path, run_id)
    run.train(0.2)
    assert "step 3 is not that of the interrupted run: on rank 0, the batch differs;" in said(run)


@pytest.mark.parametrize(("ahead", "differs"), [(3, False), (9, True)])
def test_the_batch_that_was_fetched_ahead_is_compared_with_the_one_after_it(
    tmp_path, monkeypatch, ahead, differs
):
    run_id = stopped(tmp_path, monkeypatch, ResumePoint.BATCH)
    run = resumed(tmp_path, run_id)
    run.trainer.optimizers = [Fake(param_groups=[{"lr": 0.5}])]
    run.trainer.fit_loop._data_fetcher = fetched(ahead)
    run.train(0.2)
    if differs:
        assert "step 4 is not that of the interrupted run: on rank 0, the batch differs" in said(
            run
        )
        assert run.proof.difference.position == (0, 3)
    else:
        assert run.proof.difference is None
    assert not run.proof.expected_ahead


def test_an_earlier_difference_stays_the_first(tmp_path, monkeypatch):
    run_id = stopped(tmp_path, monkeypatch, ResumePoint.BATCH)
    run = resumed(tmp_path, run_id)
    run.trainer.fit_loop._data_fetcher = fetched(9)
    run.proof.difference = earlier = Difference((0, 2), 0, 2, "x", "y")
    run.train(0.2)
    assert run.proof.difference is earlier


def test_a_batch_that_is_skipped_is_not_compared(tmp_path, monkeypatch):
    """on_train_batch_start may skip the batch that was announced; a step that was done, is."""
    run_id = stopped(tmp_path, monkeypatch, ResumePoint.VALIDATION, upcoming=7)
    for run_id_, says in (
        (run_id, "the state is as it was saved; the int"),
        (interrupted(tmp_path / "b", 0.0, 0.1, 0.2), "only the interrupted run had batch 2 of"),
    ):
        run = resumed(tmp_path if run_id_ == run_id else tmp_path / "b", run_id_)
        run.proof.begin_batch(torch.tensor([2]), 2)
        run.trainer.fit_loop.epoch_loop.batch_progress.current.processed = 3
        run.train(0.3)
        assert says in said(run)


# What is recorded ---------------------------------------------------------------------------------


def recorded(folder, outputs, *losses: float) -> int:
    """Return the digest of a step's losses."""
    run = Ranks(folder)
    run.begin()
    run.proof.begin_batch(torch.tensor([1]), 0)
    for loss in losses:
        run.proof.record_loss(torch.tensor(loss))
    run.proof.end_batch(outputs)
    run.proof.record_loss(torch.tensor(5.0))  # outside of a batch
    run.proof.end_batch(None)
    (step,) = run.steps
    return step.loss


def test_the_losses_of_a_step(tmp_path):
    """Those that were recorded, or else the one that training_step returned."""
    a, b = (batch_digest.float_bits(value) for value in (0.5, 0.25))
    loss = torch.tensor(0.25)
    assert recorded(tmp_path, loss) == batch_digest.combine([b])
    assert recorded(tmp_path, {"loss": loss, "x": 1}) == batch_digest.combine([b])
    assert recorded(tmp_path, loss, 0.5) == batch_digest.combine([a])
    assert recorded(tmp_path, loss, 0.5, 0.25) == batch_digest.combine([a, b])
    assert recorded(tmp_path, 0.25) == recorded(tmp_path, None) == batch_digest.combine([])


def test_the_learning_rates_of_a_step(tmp_path):
    run = Ranks(tmp_path)
    run.begin()
    groups = [{"lr": 0.1}, {"lr": None}, {"lr": 0.2}]
    run.trainer.optimizers = [Fake(param_groups=groups[:2]), Fake(param_groups=groups[2:])]
    run.train(0.0, 0.0)
    groups[2]["lr"] = 0.3
    run.train(0.0)
    groups[2]["lr"] = torch.tensor(0.3)
    run.train(0.0)
    groups[2]["lr"] = torch.tensor(0.4)
    run.train(0.0)
    bits = {rate: batch_digest.float_bits(rate) for rate in (0.1, 0.2, 0.3)}
    combine = batch_digest.combine
    first, second, third, *others = [step.rates for step in run.steps]
    assert first == second == combine([combine([bits[0.1], bits[0.2]])])
    assert third == combine([combine([bits[0.1], bits[0.3]])])
    assert others == [
        combine([bits[0.1], batch_digest.float_bits(torch.tensor(rate))]) for rate in (0.3, 0.4)
    ]


def test_another_learning_rate_is_reported(tmp_path):
    first = Ranks(tmp_path)
    first.trainer.optimizers = [Fake(param_groups=[{"lr": 0.1}])]
    first.begin()
    first.train(0.0, 0.1, 0.2)
    first.proof.close()
    run = resumed(tmp_path, first.proof.run_id)
    run.trainer.optimizers = [Fake(param_groups=[{"lr": 0.2}])]
    run.train(9.0)
    assert "on rank 0, the learning rate and the loss differ; likely" in said(run)


def test_the_journal_begins_with_the_oldest_checkpoint_that_is_kept(tmp_path):
    """Or with the place where the run began."""
    run = Ranks(tmp_path, keep=1)
    proof = run.begin()
    run.train(0.0, 0.1)
    proof.checkpoint_saved(ResumePoint.BATCH)
    assert min(proof.journal.records) == (0, 0)
    run.train(0.2, 0.3)
    proof.checkpoint_saved(ResumePoint.VALIDATION)
    assert min(proof.journal.records) == (0, 2)
    run.trainer.fit_loop.epoch_progress.current.processed = 1  # the counter of batches stays
    proof.checkpoint_saved(ResumePoint.EPOCH)
    assert not proof.journal.records
    run.trainer.fit_loop.epoch_loop.batch_progress.current.processed = 0
    run.train(0.4, 0.5)
    proof.checkpoint_saved(ResumePoint.BATCH)
    assert min(proof.journal.records) == (1, 0)


def test_a_checkpoint_has_the_journal_written(tmp_path, capsys):
    run = Ranks(tmp_path)
    proof = run.begin()
    run.train(0.0)
    proof.journal.next_write_at = float("inf")  # no time for it until then
    run.train(0.1)
    size = (tmp_path / "journal-0.bin").stat().st_size
    proof.checkpoint_saved(ResumePoint.BATCH)
    assert (tmp_path / "journal-0.bin").stat().st_size == size + journal.RECORD.size
    assert capsys.readouterr().out == ""
    proof.journal.problem = "No space left on device"
    proof.checkpoint_saved(ResumePoint.BATCH)
    assert capsys.readouterr().out == (
        f"warning: the journal {tmp_path}/journal-0.bin cannot be written (No space left on "
        "device); the steps after an interruption cannot be compared\n"
    )


@pytest.mark.parametrize("end", [ResumeCheck.close, ResumeCheck.finish])
def test_a_run_that_has_not_begun_has_nothing_to_end(tmp_path, end):
    end(Ranks(tmp_path).proof)
    assert not list(tmp_path.iterdir())


# Digests on a GPU ---------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, in seconds; and losses that stay on a device for a while."""
    now = [100.0]
    monkeypatch.setattr(verification, "time", Fake(monotonic=lambda: now[0]))
    bits = batch_digest.float_bits
    monkeypatch.setattr(batch_digest, "float_bits", lambda value: torch.tensor(bits(value)))
    return now


def test_digests_on_a_device_are_read_together(tmp_path, clock):
    run = Ranks(tmp_path)
    run.begin()
    run.train(*([0.5] * 49))
    assert run.positions == []
    run.train(0.25)
    losses = [step.loss for step in run.steps]
    a, b = (batch_digest.combine([int(batch_digest.float_bits(loss))]) for loss in (0.5, 0.25))
    assert losses == [a] * 49 + [b]


def test_digests_on_a_device_are_read_after_a_second(tmp_path, clock):
    run = Ranks(tmp_path)
    run.begin()
    run.train(0.0)
    clock[0] += 1.0
    run.train(0.1)
    assert run.positions == []
    clock[0] += 0.001
    run.train(0.2)
    assert len(run.positions) == 3
    clock[0] += 0.5
    run.train(0.3)
    clock[0] += 0.6
    run.train(0.4)
    assert len(run.positions) == 3  # the second starts over
    run.proof.finish()
    assert run.positions == [(0, batch) for batch in range(5)]


def finished(folder, *losses: float) -> bytes:
    """Train on some batches, wait for the device, and return the run's name."""
    run = Ranks(folder)
    run.begin()
    run.train(*losses)
    run.proof.finish()
    return run.proof.run_id


@pytest.mark.parametrize(("loss", "identical"), [(0.2, True), (7.0, False)])
@pytest.mark.parametrize("report", [ResumeCheck.report, ResumeCheck.finish])
def test_digests_on_a_device_count_in_the_result(tmp_path, clock, report, loss, identical):
    run = resumed(tmp_path, finished(tmp_path, 0.0, 0.1, 0.2))
    run.train(loss)
    report(run.proof)
    assert run.proof.results[0]["identical"] is identical and not run.proof.on_gpu


def test_a_difference_on_a_device_is_found_when_a_checkpoint_is_due(tmp_path, clock, capsys):
    run = resumed(tmp_path, finished(tmp_path, 0.0, 0.1, 0.2))
    run.train(7.0)
    run.proof.report_difference()
    assert "on rank 0, the loss differs" in capsys.readouterr().out


def test_digests_that_are_on_the_way_are_waited_for_at_the_end_alone(tmp_path, clock, monkeypatch):
    run = Ranks(tmp_path)
    proof = run.begin()
    run.train(0.5)
    copied = []
    event = Fake(query=lambda: bool(copied), synchronize=lambda: copied.append(True))
    batches = proof.on_gpu
    values = torch.stack([part for part in batches[0].parts if isinstance(part, torch.Tensor)])
    proof.on_gpu, proof.being_copied = [], (batches, values, event)
    monkeypatch.undo()
    run.train(*([0.5] * 50))  # these could be read at once
    assert len(proof.on_gpu) == 50 and run.positions == []
    proof.read_digests()
    assert copied and run.positions == [(0, batch) for batch in range(51)]
    assert len({step.loss for step in run.steps}) == 1 and not proof.being_copied


def test_digests_that_have_arrived_are_recorded_with_the_next_batch(tmp_path, clock):
    run = Ranks(tmp_path)
    proof = run.begin()
    run.train(0.5)
    batches = proof.on_gpu
    values = torch.stack([part for part in batches[0].parts if isinstance(part, torch.Tensor)])
    event = Fake(query=lambda: True)
    proof.on_gpu, proof.being_copied = [], (batches, values, event)
    run.train(0.5)
    assert run.positions == [(0, 0)] and len(proof.on_gpu) == 1 and proof.being_copied is None
