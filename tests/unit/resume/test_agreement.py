"""All ranks learn of a signal to one rank at the next step, however long steps take."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import ranks
import torch
from containers import ROOT
from short_trainings import (
    Announces,
    At,
    Scaled,
    TurnedClock,
    Validated,
    fit,
    interrupted,
    kill,
    press_ctrl_c,
    saved,
)
from torch import distributed

from sagemaker_lightning import UserError
from sagemaker_lightning.callbacks.divergence import Divergence
from sagemaker_lightning.contract import process_stat, shutdown
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.shutdown import Stop, TrainingStop
from sagemaker_lightning.data.loaders.resumable import digest_of
from sagemaker_lightning.resume import agreement, run, stopping
from sagemaker_lightning.resume.agreement import Agreement, Comparison
from sagemaker_lightning.resume.files import checkpoint_dir


def calls_until_heard(counts: int) -> list[int]:
    """Return after how many calls each of two signals was heard.

    The second one is heard as a due checkpoint.
    """
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=rank == 0))
    for _ in range(counts):
        agreement.agree(0, False)
    # A numpy generator's state has this form.
    gathered = agreement.gather({"key": torch.tensor([rank, 2**32 - 1]).to(torch.uint32)})
    assert [answer["key"].tolist() for answer in gathered] == [[0, 2**32 - 1], [1, 2**32 - 1]]
    calls = []
    for number, due in ((0, rank == 0), (15 if rank == 1 else 0, False)):
        calls.append(0)
        while not (agreement.signal_number or agreement.checkpoint_due):
            agreement.agree(number, due)
            calls[-1] += 1
        agreement.checkpoint_saved()
    agreement.receive()
    distributed.destroy_process_group()
    return calls


@pytest.fixture
def group():
    """A group of this process alone, which tells itself what ranks tell each other."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def said(agreement: Agreement) -> tuple:
    return (
        agreement.signal_number,
        agreement.checkpoint_due,
        agreement.diverged,
        agreement.comparison,
    )


def test_what_is_said_counts_from_the_next_call_on(group):
    """A signal and a divergence stay; a checkpoint that is due is due once."""
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=True))
    agreement.receive()  # nothing is on its way
    agreement.agree(15, True, True, comparison=Comparison.DIFFERENT)
    assert said(agreement) == (0, False, False, Comparison.OPEN)
    agreement.agree(2, True)
    assert said(agreement) == (15, True, True, Comparison.DIFFERENT)
    agreement.agree(0, False)
    assert said(agreement) == (15, False, True, Comparison.IDENTICAL)
    assert type(agreement.comparison) is Comparison
    agreement.agree(0, True, now=True)
    assert said(agreement) == (15, True, True, Comparison.IDENTICAL)
    agreement.checkpoint_saved()
    assert not agreement.checkpoint_due


def test_what_is_on_its_way_is_waited_for(group, monkeypatch):
    def all_reduce(flags, **_) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: flags.copy_(torch.tensor([15, 1, 1, 2, 1, 1])))

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=True))
    agreement.agree(0, False)
    agreement.receive()
    assert said(agreement) == (15, True, True, Comparison.DIFFERENT) and agreement.uploading
    assert agreement.copy_due


def test_values_are_exchanged_in_a_group_that_needs_no_gpu(group, monkeypatch):
    groups = []
    all_gather_object = distributed.all_gather_object

    def noting(contents: list, content: bytes, group) -> None:
        groups.append(group)
        all_gather_object(contents, content, group=group)

    monkeypatch.setattr(distributed, "all_gather_object", noting)
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=True))
    assert agreement.gather("a") == ["a"]
    assert groups == [agreement.group] and distributed.get_backend(groups[0]) == "gloo"


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_rank_alone_says_when_a_checkpoint_is_due(group, is_first):
    """And whether the one before is on its way to S3, and a copy in memory is due."""
    agreement = Agreement(SimpleNamespace(world_size=2, is_global_zero=is_first))
    agreement.agree(0, True, now=True, uploading=True, copy_due=True)
    assert said(agreement) == (0, is_first, False, Comparison.IDENTICAL)
    assert agreement.uploading is agreement.copy_due is is_first


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copy_is_due_until_it_is_taken(group, ranks):
    """It is said once, and may have to wait for a step that adds to no gradients."""
    agreement = Agreement(SimpleNamespace(world_size=ranks, is_global_zero=True))
    agreement.agree(0, False, copy_due=True)
    assert agreement.copy_due is (ranks == 1)
    for _ in range(2):
        agreement.agree(0, False, now=True)
        assert agreement.copy_due
    agreement.copy_taken()
    agreement.agree(0, False, now=True)
    assert not agreement.copy_due


def test_one_rank_needs_no_others():
    agreement = Agreement(SimpleNamespace(world_size=1, is_global_zero=True))
    agreement.agree(2, True, comparison=Comparison.OPEN)
    assert said(agreement) == (2, True, False, Comparison.OPEN)
    agreement.agree(0, False, True)
    assert said(agreement) == (0, False, True, Comparison.IDENTICAL)
    assert agreement.gather("a") == ["a"]


def test_the_worse_of_two_comparisons_is_greater():
    assert Comparison.IDENTICAL < Comparison.OPEN < Comparison.DIFFERENT


@pytest.mark.slow
def test_a_stop_is_heard_at_the_next_call(tmp_path: Path):
    ended = ranks.run(calls_until_heard, 300, folder=tmp_path)
    assert [ended_rank.value for ended_rank in ended] == [[2, 2], [2, 2]], [
        ended_rank.error for ended_rank in ended
    ]


PROGRAM_OF_NOHUP = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.shutdown import Stop, leave_at_once
from pathlib import Path
leave_at_once()
signal.raise_signal(signal.SIGHUP)
with Stop(CheckpointHome(Path("nowhere")), print):
    signal.raise_signal(signal.SIGHUP)
print(signal.getsignal(signal.SIGHUP).name)
"""


@pytest.mark.slow
def test_a_program_of_nohup_outlives_its_terminal(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM_OF_NOHUP], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "SIG_IGN\n", "")


RANK_WHOSE_OUTPUT_IS_CLOSED = """
import os, signal, sys, time
from pathlib import Path
from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
sys.stdout.close()
with shutdown.Stop(CheckpointHome(Path("nowhere")), lambda line: print(line, flush=True)):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(%s)
"""


def test_a_signal_ends_a_process_whose_output_is_closed():
    run = subprocess.run(
        [sys.executable, "-c", RANK_WHOSE_OUTPUT_IS_CLOSED % ranks.HANG_SECONDS],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 143


# In this process ----------------------------------------------------------------------------------


class Left(BaseException):
    """Stands for the end of this process."""


class Clock(threading.Event):
    """Notes how long it is waited for; that time passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return False


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the handlers and the wakeup descriptor."""
    handlers = {number: signal.getsignal(number) for number in shutdown.SIGNALS}
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(descriptor)


def watched(kind: type[Stop], folder: Path = Path("nowhere")) -> Stop:
    """Return a Stop that notes why it would end this process."""

    class Watched(kind):
        def end_process(self, why: str) -> None:
            self.reasons.append(why)
            raise SystemExit  # it ends the thread

    stop = Watched(folder, print)
    stop.reasons = []
    stop.left = Clock()
    return stop


def hear(stop: Stop, *numbers: int) -> None:
    """Have a Stop's thread hear of signals, all at once; wait until it has."""
    os.write(stop.pipe[1], bytes(numbers))
    deadline = time.monotonic() + ranks.HANG_SECONDS
    while stop.signal_number is None and time.monotonic() < deadline:
        time.sleep(0.001)


def no_batch(seconds: int) -> list[str]:
    """Return the reason of a process in which no batch came to its end."""
    return [f"no batch ended within {seconds} s, so there is no newer checkpoint"]


NOT_WRITTEN = ["the checkpoint was not written within 90 s, so there is no newer checkpoint"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [Stop, TrainingStop])
@pytest.mark.parametrize(
    ("phase", "batch_seconds", "waits", "reasons"),
    [
        ("end", 20.0, [], ["it came while nothing was being trained"]),
        ("begin", 0.0, [25.0], no_batch(25)),
        ("begin", 20.0, [40.0], no_batch(40)),
        ("begin", 100.0, [90.0], no_batch(90)),
        ("save_last", 0.0, [25.0, 65.0], NOT_WRITTEN),
        ("save_last", 20.0, [40.0, 50.0], NOT_WRITTEN),
    ],
)
def test_how_long_a_process_may_continue_after_a_signal(
    signals, capfd, kind, phase, batch_seconds, waits, reasons
):
    """Another signal that comes at the same time, here a child's end, changes nothing."""
    stop = watched(kind)
    with stop:
        getattr(stop, phase)()
        stop.batch_seconds = batch_seconds
        hear(stop, signal.SIGCHLD, signal.SIGTERM)
        stop.thread.join(ranks.HANG_SECONDS)
    assert (stop.left.waits, stop.reasons) == (waits, reasons)
    assert ("most recent call first" in capfd.readouterr().err) == bool(waits)
    ends = kind is Stop  # it is about to end, and no signal may cut that short
    assert (signal.getsignal(signal.SIGTERM) is signal.SIG_IGN) == ends


def test_ctrl_c_never_ends_somebody_elses_process(signals):
    stop = watched(TrainingStop)
    with stop:
        hear(stop, signal.SIGINT)
    assert stop.signal_number == signal.SIGINT and not (stop.left.waits or stop.reasons)


@pytest.mark.parametrize("kind", [Stop, TrainingStop])
def test_a_batch_that_ends_in_time_ends_nothing(signals, kind):
    stop = watched(kind)
    stop.left = threading.Event()
    with stop:
        stop.begin()
        assert stop.thread.daemon  # a program that never leaves it can still end
        hear(stop, signal.SIGTERM)
    assert stop.reasons == [] and not stop.thread.is_alive()


def test_a_handler_counts_before_the_thread_hears_of_the_signal(signals, capfd):
    """A batch may end in between. The first signal counts."""
    with watched(TrainingStop) as stop:
        assert stop.phase is shutdown.Phase.TRAINING
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.getsignal(number)(number, None)
            assert stop.signal_number == signal.SIGTERM
    says = "stopping at the end of this batch; Ctrl-C again stops at once\n"
    assert capfd.readouterr().err == says


def test_what_is_installed_meanwhile_stays(signals):
    def handle(*_) -> None:
        pass

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = [signal.getsignal(number) for number in shutdown.SIGNALS[1:]]
    with watched(TrainingStop):
        signal.signal(signal.SIGTERM, handle)
        signal.set_wakeup_fd(writing)
    assert [signal.getsignal(number) for number in shutdown.SIGNALS] == [handle, *before]
    with watched(TrainingStop):
        signal.set_wakeup_fd(-1)
    assert signal.set_wakeup_fd(-1) == writing
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_whoever_waited_for_signals_before_hears_of_them_too(signals):
    """Such as asyncio, which learns of a child's end so."""
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(writing)
    with watched(TrainingStop) as stop:
        stop.left = threading.Event()
        hear(stop, signal.SIGCHLD, signal.SIGTERM)
    assert os.read(reading, 9) == bytes([signal.SIGCHLD, signal.SIGTERM])
    signal.set_wakeup_fd(-1)
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_handler_that_is_not_pythons_becomes_the_default(signals, monkeypatch):
    stop = watched(TrainingStop)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: None)
        stop.__enter__()
    stop.__exit__()
    assert [signal.getsignal(number) for number in shutdown.SIGNALS] == [signal.SIG_DFL] * 3


def test_a_stop_leaves_no_thread_no_descriptor_and_no_handler(signals):
    class Slow(threading.Event):
        def is_set(self) -> bool:
            time.sleep(0.02)
            return super().is_set()

    stop = watched(TrainingStop)
    stop.left = Slow()
    with stop:
        pass
    assert not stop.thread.is_alive()
    for descriptor in stop.pipe:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert stop not in shutdown._entered


def test_a_batch_takes_the_time_between_two_ends(monkeypatch):
    times = iter([100.0, 107.0, 109.0])
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: next(times)))
    stop = Stop(CheckpointHome(Path("nowhere")), print)
    seconds = [stop.batch_seconds]
    for _ in range(3):
        stop.batch_ended()
        seconds.append(stop.batch_seconds)
    assert seconds == [0.0, 0.0, 7.0, 2.0]


def in_a_child() -> str:
    """Return the handlers and the wakeup descriptor of a forked child."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        with suppress(BaseException):
            handlers = [str(signal.getsignal(number)) for number in shutdown.SIGNALS]
            os.write(writing, f"{handlers} {signal.set_wakeup_fd(-1)}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as file:
        return file.read()


def test_a_forked_child_has_default_handlers_of_its_own(signals):
    """As a data worker. A child of a process that trains nothing has its parent's."""
    own = [str(signal.getsignal(number)) for number in shutdown.SIGNALS]
    assert in_a_child() == f"{own} -1"
    with watched(TrainingStop):
        assert in_a_child() == f"{[str(signal.SIG_DFL)] * 3} -1"
    assert in_a_child() == f"{own} -1"


@pytest.mark.parametrize("number", shutdown.SIGNALS)
def test_before_the_training_a_signal_ends_a_process_at_once(signals, monkeypatch, capfd, number):
    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    shutdown.leave_at_once()
    with pytest.raises(Left) as left:
        signal.raise_signal(number)
    assert left.value.args == (128 + number,)
    assert capfd.readouterr().err == f"{number.name}: nothing is being trained\n"


def test_what_was_printed_before_the_end_is_not_lost(tmp_path, monkeypatch):
    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    (tmp_path / "step-000000007.ckpt").touch()
    lines = []
    stop = Stop(CheckpointHome(tmp_path), lines.append)
    stop.signal_number = signal.SIGTERM
    with (tmp_path / "out").open("w") as output, (tmp_path / "err").open("w") as errors:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        print("printed")
        print("warned", file=sys.stderr)
        with pytest.raises(Left) as left:
            stop.end_process("why")
        assert (tmp_path / "out").read_text() == "printed\n"
        assert (tmp_path / "err").read_text() == "warned\n"
    assert left.value.args == (143,)
    assert lines == ["interrupted, resume from step 7: SIGTERM; why"]


def test_the_first_process_is_asked_whether_it_loses_sigterm(tmp_path, monkeypatch):
    """A process's name may have any characters."""
    status = tmp_path / "status"
    monkeypatch.setattr(process_stat, "Path", {"/proc/1/status": status}.__getitem__)
    for handled, says in (("4000", ""), ("10000", "my:\tinit")):  # SIGTERM, and SIGCHLD alone
        status.write_text(f"Name:\tmy:\tinit\nSigBlk:\t0\nSigCgt:\t{handled.rjust(16, '0')}\n")
        assert shutdown.loses_sigterm() == says
    for blocked, says in (("4000", ""), ("10000", "my:\tinit")):
        status.write_text(f"Name:\tmy:\tinit\nSigBlk:\t{blocked.rjust(16, '0')}\nSigCgt:\t0\n")
        assert shutdown.loses_sigterm() == says


@pytest.fixture
def heard(monkeypatch) -> list[tuple[int, int, int, int]]:
    """Let this process be one of two ranks: what another one says counts, too.

    It is what the other rank says each time: a signal, whether a checkpoint is due, whether it has
    diverged, and how its comparison stands; nothing once the list is empty.
    """

    def all_reduce(flags: torch.Tensor, **_) -> SimpleNamespace:
        if others:
            # Rank 0 alone says what is uploaded, and when a copy is due.
            said = torch.tensor([*others.pop(0), 0, 0])
            flags[:] = torch.maximum(flags, said)
        return SimpleNamespace(wait=lambda: None)

    def begin(self, trainer: pl.Trainer) -> None:
        alone(self, trainer)
        self.group = "gloo"

    others: list[tuple[int, int, int, int]] = []
    alone = agreement.Agreement.__init__
    monkeypatch.setattr(agreement.Agreement, "__init__", begin)
    monkeypatch.setattr(agreement.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(agreement, "gather", lambda value, group: [value])
    return others


@pytest.mark.parametrize(
    ("moment", "says", "when"),
    [
        ("batch 2", [], {3: "batch"}),
        ("never", [(15, 0, 0, 0)], {2: "batch"}),
        ("never", [(0, 0, 0, 0)] * 5 + [(15, 0, 0, 0)], {6: "epoch"}),
        ("end of epoch 0", [], {6: "epoch"}),
    ],
)
def test_ranks_stop_at_the_same_batch(tmp_path, heard, moment, says, when):
    """It is the next one: no step waits for what the others say; the end of an epoch does."""
    heard += says
    with interrupted(143 if says else 130):
        fit(tmp_path, At(moment, press_ctrl_c), max_epochs=2)
    assert saved(tmp_path) == when


def test_ranks_stop_at_the_same_batch_of_a_validation(tmp_path, heard):
    seen = []
    with interrupted():
        stop = At("validation 0", press_ctrl_c)
        fit(tmp_path, stop, At("validation .", seen.append), model=Validated())
    assert len(seen) == 2 and saved(tmp_path) == {6: "validation"}


def test_the_command_line_reports_a_stop_itself(tmp_path, heard):
    told = []
    heard.append((15, 0, 0, 0))
    home = CheckpointHome(tmp_path)
    with shutdown.Stop(home, lambda *given: told.append(given)) as stop, interrupted(143):
        fit(tmp_path, stop=stop)
    ((line, is_loud),) = told
    assert line.startswith("interrupted, resume from step 2: SIGTERM; ") and is_loud is True


def test_a_checkpoint_that_is_due_is_saved_by_all_ranks_at_the_next_batch(
    tmp_path, heard, monkeypatch
):
    monkeypatch.setattr(checkpoint_dir.BackgroundWriter, "is_writing", False)
    fit(tmp_path, TurnedClock(monkeypatch, "", 0.0), every_n_minutes=2, keep=9)
    assert [*saved(tmp_path)] == [3, 6]


def test_all_ranks_end_if_one_has_diverged(tmp_path, heard, monkeypatch):
    def check(self, trainer: pl.Trainer) -> None:
        raise UserError(f"after step {trainer.global_step}")

    heard += [(0, 0, 0, 0), (0, 0, 1, 0)]
    monkeypatch.setattr(Divergence, "check", check)
    with pytest.raises(UserError, match="after step 3"):
        fit(tmp_path, Divergence())


@pytest.mark.parametrize(
    ("says", "order"),
    [
        ([(0, 0, 0, agreement.Comparison.OPEN)] * 9, ["4", "5", "6", "resumed"]),
        ([(0, 0, 0, agreement.Comparison.DIFFERENT)], ["4", "5", "resumed", "6"]),
    ],
)
def test_all_ranks_say_together_whether_steps_are_the_same(tmp_path, capfd, heard, says, order):
    """At the next batch if one has found a difference; else when all have compared all steps."""
    kill(tmp_path)
    capfd.readouterr()
    heard += says
    fit(tmp_path, Announces())
    lines = capfd.readouterr().out.splitlines()[1:]
    assert [
        line.split()[-1] if "batch " in line[:6] else line.split()[0] for line in lines
    ] == order


def test_a_step_that_is_another_is_not_saved_if_that_ends_the_job(tmp_path, heard, monkeypatch):
    """Although the others have not said yet how theirs was."""
    monkeypatch.setenv("FACTOR", "1")
    kill(tmp_path, Scaled)
    monkeypatch.setenv("FACTOR", "2")
    with pytest.raises(UserError, match="step 4 is not that of the interrupted run"):
        fit(tmp_path, model=Scaled(), strict=True, every_n_steps=1)
    assert [*saved(tmp_path)] == [3]


def test_a_rank_hears_why_another_one_cannot_be_resumed_within_an_epoch():
    assert agreement.common_reason([("", {}), ("others each time", {})]) == "others each time"
    assert agreement.common_reason([("", {}), ("", {})]) == ""


def test_why_a_run_cannot_be_resumed_within_an_epoch_is_said_once(capfd):
    """The first rank says so."""
    for first, said in ((True, 1), (False, 0)):
        this = SimpleNamespace(trainer=SimpleNamespace(is_global_zero=first))
        saves = stopping.Stopping(this, stopping.Intervals(0, 0))
        for _ in range(2):
            saves.save_only_epochs("its data are others each time")
        says = (
            "warning: its data are others each time: checkpoints are saved only at the end of an "
            "epoch, and a stopped run goes back to the last one\n"
        )
        assert capfd.readouterr().out == says * said


@pytest.mark.parametrize("others", [{"train 0 Own": 2}, {}])
def test_a_sampler_that_shares_the_samples_out_is_one_line(others):
    agreement.refuse_other_orders([("", {"train Own": 1}), ("", {"train Own": 1})])
    says = r"^Trainer\(use_distributed_sampler=...\): found True, and Own, which draws other "
    with pytest.raises(UserError, match=says):
        agreement.refuse_other_orders([("", {"train Own": 1}), ("", others)])


@pytest.mark.parametrize(
    ("ranks", "first", "same", "warns"),
    [(2, True, True, 1), (2, True, False, 0), (2, False, True, 0), (1, True, True, 0)],
)
def test_ranks_that_train_on_the_same_batch_are_said_once(capfd, ranks, first, same, warns):
    batch = [torch.ones(2)]
    this = object.__new__(run.Run)
    this.saves, this.has_compared_batches = True, False
    this.check = SimpleNamespace(begin_batch=lambda *_: None)
    this.live_draws = SimpleNamespace(batch_begins=lambda *_: None)
    this.stopping = SimpleNamespace(why_only_epochs="")
    others = [digest_of(batch) if same else 1]
    this.agreement = SimpleNamespace(gather=lambda value: [value, *others])
    this.trainer = SimpleNamespace(world_size=ranks, is_global_zero=first)
    for number in range(2):
        this.batch_begins(batch, number)
    says = (
        "warning: all 2 ranks train on the same batch: they share the samples of a dataset with "
        "indices, while an IterableDataset has to yield the samples of its own rank\n"
    )
    assert capfd.readouterr().out == says * warns
