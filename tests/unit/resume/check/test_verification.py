"""resume/check/verification.py: a resumed run compares itself with the interrupted one.

It says whether it does the same again, or what differs first.
"""

import json
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import ranks
import torch
from containers import ROOT
from pytorch_lightning import Callback
from short_trainings import (
    Announces,
    At,
    ByHand,
    Scaled,
    end,
    equal,
    fit,
    interrupted,
    kill,
    press_ctrl_c,
)
from test_rank_states import Own
from test_strangers import PERSISTENT_FLAG, STRANGERS, WORKERS_FLAG, Run

from sagemaker_lightning import ExactResume, UserError
from sagemaker_lightning.resume.check import journal, verification

pytestmark = pytest.mark.slow

SAVES_FLAG = "--resume.every_n_steps=4"


class Broken(Run):
    """A job whose programs note each step at once, and whose resumed run has a mistake."""

    program = ROOT / "tests/support/broken.py"

    def kill(self, at: str = "1:9") -> None:
        """Kill the run at a position of the model's, which loses a few steps."""
        assert self.start(KILL_AT=at) == -signal.SIGKILL, self.output[-3000:]

    def stop(self, at: str = "1:6") -> None:
        """Stop the run, which loses no step."""
        assert self.start(STOP_AT=at) == 128 + signal.SIGTERM, self.output[-3000:]

    @property
    def verdicts(self) -> list[str]:
        """The lines in which the run says how it compares."""
        return [
            line
            for line in self.output.splitlines()
            if re.match(r"(warning: |error: .*)?resumed at step ", line)
        ]

    @property
    def described(self) -> list[dict]:
        """What model.json says of the resumes."""
        return json.loads((self.folder / "output/model/model.json").read_text())["resumes"]


def test_what_is_done_again_is_what_was_done(tmp_path: Path):
    """The run is killed twice; model.json has the verdicts of both."""
    run = Broken(tmp_path)
    run.kill("1:6")
    run.kill("2:3")
    expected_line = (
        "resumed at step 10: the next 6 steps are those of the interrupted run, bit for bit"
    )
    assert run.verdicts == [expected_line]
    run.finish()
    assert run.verdicts == [
        "resumed at step 20: the next 3 steps are those of the interrupted run, bit for bit"
    ]
    assert [
        (verdict["step"], verdict["steps"], verdict["identical"]) for verdict in run.described
    ] == [
        (10, 6, True),
        (20, 3, True),
    ]
    assert run.described[0]["said"] == expected_line.partition(": ")[2]
    run.finish()  # nothing is left to train, and model.json still says it
    assert not run.verdicts and len(run.described) == 2


@pytest.mark.parametrize(
    "name", ["two optimizers, by hand", "accumulated gradients", "an iterable dataset in workers"]
)
def test_code_of_a_few_kinds(tmp_path: Path, name):
    run = Broken(tmp_path, *STRANGERS[name], "--resume.every_n_steps=6")
    run.kill("1:7")
    run.finish()
    (verdict,) = run.verdicts
    assert re.search(
        r": the next (\d steps are those|step is that) of the interrupted run, bit for bit$",
        verdict,
    )


STATE = r"the state is not that of the interrupted run: on rank 0, "
STEP = r"step \d+ is not that of the interrupted run: on rank 0, "
MISTAKES_FOUND = [
    ("the loaders begin at the first batch", [WORKERS_FLAG], "the batch and the loss differ"),
    ("the order is that of another epoch", [], "the batch and the loss differ"),
    (
        "generators are not seeded",
        ["--data.sampler=shuffled"],
        r"the batch .*a generator of random numbers in strangers\.Shuffled\.random[;,]",
    ),
    (
        "generators are not seeded",
        ["--data.dataset=numpy"],
        r"the batch .*a generator of random numbers in strangers\.Points\.generator[;,]",
    ),
    (
        "generators are not seeded",
        ["--data.dataset=state", WORKERS_FLAG, PERSISTENT_FLAG],
        r"the batch .*a generator of random numbers in strangers\.Points\.generator[;,]",
    ),
    (
        "what is drawn on the way is not seeded",
        ["--model=strangers.Augmented"],
        r"the batch .*what strangers\.Augmented\.on_after_batch_transfer draws",
    ),
    (
        "a step is not seeded",
        [],
        "the loss differs; likely because of state that no checkpoint holds, or a kernel",
    ),
    (
        "what was seen is not skipped",
        ["--data.dataset=stream"],
        r"the batch .*strangers\.Stream, an IterableDataset, which has to draw the same "
        r"samples again",
    ),
    (
        "what samplers hold is not restored",
        ["--data.sampler=counting"],
        "the batch and the loss differ",
    ),
]
STATE_MISTAKES = [
    (
        "generators are not restored",
        ["--model=strangers.Remembering"],
        r"generators model\.generator differs",
    ),
    ("modes are not restored", ["--model=strangers.EvalMode"], "eval body"),
    ("modes are not restored", ["--model=strangers.Unfrozen"], r"frozen body\.0\.weight"),
    (
        "schedulers are not restored",
        ["--model=strangers.Estimated"],
        r"lr_schedulers\.0\.last_epoch",
    ),
    ("optimizers are not restored", ["--model=strangers.Estimated"], r"optimizer_states\.0\."),
    ("weights are not restored", [], r"state_dict\.body\.0\.weight"),
    ("what objects hold is not restored", ["--model=strangers.Remembering"], r"model\.count"),
    (
        "what objects hold is not restored",
        ["--data.dataset=growing"],
        r"train\.0\.dataset\.seen differs",
    ),
    (
        "buffers and metrics are not restored",
        ["--model=strangers.Measured"],
        r"metrics\.model\.range",
    ),
    (
        "an average is not restored",
        [
            "--trainer.callbacks=StochasticWeightAveraging",
            "--trainer.callbacks.swa_lrs=0.01",
            "--trainer.callbacks.swa_epoch_start=1",
            "--data=strangers.Validated",
        ],
        "callbacks.*average_model_state",
    ),
]


def cases(parameters: list, *always_run: int) -> list:
    """Return the cases as parameters; the soak has all."""
    return [
        pytest.param(
            *parameter,
            id=f"{parameter[0]} {' '.join(parameter[1][:1])}",
            marks=[] if number in always_run else [pytest.mark.soak],
        )
        for number, parameter in enumerate(parameters)
    ]


@pytest.mark.parametrize(("mistake", "flags", "words"), cases(MISTAKES_FOUND, 0, 6))
def test_a_mistake_is_found_in_what_is_done_again(tmp_path: Path, mistake, flags, words):
    """The run is killed, and resumed with one mechanism broken."""
    run = Broken(tmp_path, *flags, SAVES_FLAG)
    run.kill()
    run.finish(BREAK=mistake)
    (verdict,) = run.verdicts
    assert re.match(rf"warning: resumed at step \d+: {STEP}{words}", verdict), verdict
    assert run.described[0]["identical"] is False and run.described[0]["said"] in verdict


@pytest.mark.parametrize(
    ("mistake", "flags", "words"), cases(MISTAKES_FOUND[:6] + MISTAKES_FOUND[7:], 0, 3)
)
def test_a_mistake_is_found_in_the_batch_that_was_announced(tmp_path: Path, mistake, flags, words):
    run = Broken(tmp_path, *flags)
    run.stop()
    run.finish(BREAK=mistake)
    (verdict,) = run.verdicts
    words = words.replace(" and the loss differ", " differs")
    assert re.match(rf"warning: resumed at step 17: {STEP}{words}", verdict), verdict


@pytest.mark.parametrize(("mistake", "flags", "words"), cases(STATE_MISTAKES, 0, 3, 9))
def test_state_that_is_not_given_back_is_named(tmp_path: Path, mistake, flags, words):
    run = Broken(tmp_path, *flags)
    run.stop()
    run.start(BREAK=mistake)  # some of them cannot continue at all
    (verdict,) = run.verdicts
    assert re.match(rf"warning: resumed at step 17: {STATE}.*{words}", verdict), verdict


@pytest.mark.parametrize(("mistake", "flags", "_"), cases(STATE_MISTAKES[:6], 0))
def test_state_that_is_not_given_back_shows_in_what_is_done_again(
    tmp_path: Path, mistake, flags, _
):
    """Here the state is not compared; losses and learning rates show the mistake."""
    run = Broken(tmp_path, *flags, SAVES_FLAG)
    run.kill()
    run.start(BREAK=mistake, BLIND="1")
    (verdict,) = run.verdicts
    what_differs = "the learning rate" if "--model=strangers.Estimated" in flags else "the loss"
    assert re.match(rf"warning: resumed at step \d+: {STEP}{what_differs}", verdict), verdict


CAUSES = {
    "an iterator": (
        ["--model=strangers.Cycling"],
        r"model\.signs differs; likely because of an itertools\.cycle, which cannot be",
    ),
    "the clock": (["--data.dataset=timed"], "something in the data that no seed decides: time"),
    "a worker's counter": (
        ["--data.dataset=growing", WORKERS_FLAG],
        r"what strangers\.Growing keeps in its 1 data worker",
    ),
}


@pytest.mark.parametrize(("flags", "words"), CAUSES.values(), ids=CAUSES)
def test_what_no_run_can_carry_on_is_reported_with_its_cause(tmp_path: Path, flags, words):
    run = Broken(tmp_path, *flags, SAVES_FLAG)
    run.kill()
    run.finish()
    (verdict,) = run.verdicts
    assert re.search(words, verdict), verdict


def test_what_came_otherwise_is_what_the_next_one_is_compared_with(tmp_path: Path):
    """A run is compared with the attempt before it, even if that one differed.

    It is not compared with an earlier one, of which some steps were not done again yet.
    """
    run = Broken(tmp_path, "--resume.every_n_steps=100")
    run.kill("1:8")
    assert run.start(BREAK="a step is not seeded", KILL_AT="1:3") == -signal.SIGKILL
    assert "warning: resumed at step 10: step 11 is not that" in run.verdicts[0]
    run.finish(BREAK="a step is not seeded")
    assert run.verdicts == [
        "resumed at step 10: the next 3 steps are those of the interrupted run, bit for bit"
    ]


def test_each_strict_attempt_is_compared_with_the_run_that_was_interrupted(tmp_path: Path):
    """It is not compared with the attempt before it, which made the same mistake."""
    run = Broken(tmp_path, SAVES_FLAG)
    run.kill()
    for _ in range(2):
        assert run.start("--resume.strict=true", BREAK="a step is not seeded") == 1
    run.finish("--resume.strict=true")
    assert run.verdicts[0].endswith("steps are those of the interrupted run, bit for bit"), (
        run.verdicts
    )


def test_what_was_set_otherwise_is_reported_as_the_cause(tmp_path: Path):
    """And it is the cause here: sums differ with another number of threads."""
    run = Broken(tmp_path, SAVES_FLAG)
    run.kill()
    run.finish("--data.workers=1", OMP_NUM_THREADS="2")
    cause = (
        "--data.workers, which was 0 and is 1, or threads, which was 1 and is 2; the run may end"
    )
    assert f"the loss differs; likely because of {cause}" in run.verdicts[0]


def test_a_failure_tells_of_it(tmp_path: Path, monkeypatch):
    """If a job fails later, the line that says why has it, too."""
    run = Broken(tmp_path, "--data.dataset=timed", SAVES_FLAG)
    run.kill()
    assert run.start(FAIL_AT="2:3") == 1
    pattern = (
        r"^error: RuntimeError: as it was asked to \(resumed at step \d+: step \d+ is not that of "
        r"the interrupted run: "
    )
    assert re.search(pattern, run.output, re.M), run.output[-1000:]


@pytest.mark.parametrize("content", [b"", b"x" * 1000, None], ids=["empty", "foreign", "a folder"])
def test_a_damaged_journal_harms_no_job(tmp_path: Path, content):
    run = Broken(tmp_path)
    run.kill("1:6")
    (path,) = journal.files(tmp_path / "output/data/checkpoints")
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    run.finish()
    assert run.output.count(f"warning: {path.relative_to(tmp_path)} is ") == 1
    assert "recorded no later step" in run.verdicts[0]


# Several ranks ------------------------------------------------------------------------------------


class Odd(Own):
    """A model that has another loss on rank 1, at one batch, if it is `odd`."""

    odd = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if self.odd and self.global_rank and batch_idx == 6 else loss


def train(
    folder: str, fails: int = -1, odd: bool = False, strict: bool = False, at: int = 2
) -> None:
    model = Odd(fails)
    resume = ExactResume(folder, seed=3, every_n_steps=at, strict=strict)
    model.odd = odd
    trainer = ranks.trainer([resume])
    trainer.fit(model, ranks.Numbered(44, batch_size=2))


def twice(odd: bool, strict: bool) -> None:
    """Train to step 8 with a checkpoint at step 5, and resume from there."""
    journal.MAX_WAITING_SHARE = float("inf")
    with suppress(RuntimeError):
        train("run", fails=8, at=5)
    train("run", odd=odd, strict=strict, at=100)


def test_ranks_that_continue_as_before(tmp_path: Path):
    ended = ranks.run(twice, False, False, folder=tmp_path)
    assert not any(ended_rank.error for ended_rank in ended), [
        ended_rank.error for ended_rank in ended
    ]
    expected_line = (
        "resumed at step 5: the next 3 steps are those of the interrupted run, bit for bit\n"
    )
    assert [ended_rank.output.count(expected_line) for ended_rank in ended] == [1, 0]
    assert [ended_rank.output.count("warning: resumed") for ended_rank in ended] == [0, 0]


@pytest.mark.parametrize("strict", [False, True])
def test_the_rank_that_does_not_is_named(tmp_path: Path, strict):
    """Rank 0 names rank 1, which differs; with --resume.strict, all ranks end alike."""
    ended = ranks.run(twice, True, strict, folder=tmp_path)
    expected = (
        "resumed at step 5: step 7 is not that of the interrupted run: on rank 1, the loss "
        "differs; likely because of"
    )
    if strict:
        assert all(
            ended_rank.error.startswith(f"UserError: --resume.strict: {expected}")
            for ended_rank in ended
        )
    else:
        assert not any(ended_rank.error for ended_rank in ended), [
            ended_rank.error for ended_rank in ended
        ]
        assert [ended_rank.output.count(f"warning: {expected}") for ended_rank in ended] == [1, 0]


# On a GPU -----------------------------------------------------------------------------------------


def test_a_gpu_is_not_waited_for_at_each_step(monkeypatch):
    """A loss that is a tensor stays one until there are some dozens of them."""
    read = []
    monkeypatch.setattr(
        verification.ResumeCheck,
        "_send",
        lambda self: (read.append(len(self.on_gpu)), self.on_gpu.clear()),
    )
    noted = object.__new__(verification.ResumeCheck)
    noted.on_gpu = []
    noted.being_copied = None
    noted.on_gpu_since = 0.0

    for number in range(2 * verification.BATCHES_PER_READ - 1):
        noted.current_batch = verification.Batch(
            number, (0, number), [torch.tensor(7)], [1], [torch.tensor(3)]
        )
        noted.end_batch(None)
    assert read == [verification.BATCHES_PER_READ]


@pytest.mark.parametrize(
    ("last", "options", "says"),
    [
        (
            "batch 6",
            {},
            ["4", "5", "the next 2 steps are those of the interrupted run, bit for bit", "6"],
        ),
        ("batch 4", {}, ["4", "the next step is that of the interrupted run, bit for bit"]),
        ("batch 6", {"other_settings": True}, ["4", "5", "6"]),
    ],
)
def test_steps_that_are_done_again_are_compared(tmp_path, capfd, last, options, says):
    """As many as there are until the training ends; none if the run may be another one."""
    kill(tmp_path)
    capfd.readouterr()
    fit(tmp_path, At(f"end of {last}", end), Announces(), **options)
    assert capfd.readouterr().out.splitlines()[1:] == [
        f"batch {line}" if line.isdigit() else f"resumed at step 3: {line}" for line in says
    ]


class ScaledByHand(ByHand, Scaled):
    """Does so, and optimizes by hand."""


@pytest.mark.parametrize("model", [Scaled, ScaledByHand])
def test_other_steps_than_before_are_said_at_once(tmp_path, capfd, monkeypatch, model):
    """`strict` ends the job by them."""
    monkeypatch.setenv("FACTOR", "1")
    kill(tmp_path, model)
    monkeypatch.setenv("FACTOR", "2")
    says = (
        "resumed at step 3: step 4 is not that of the interrupted run: on rank 0, the loss differs"
    )
    with pytest.raises(UserError, match=f"^--resume.strict: {says}"):
        fit(tmp_path, model=model(), strict=True)
    capfd.readouterr()
    fit(tmp_path, Announces(), model=model())
    lines = capfd.readouterr().out.splitlines()
    assert lines[2].startswith(f"warning: {says}") and lines[3] == "batch 5"


class AddsNoise(Callback):
    """Changes each batch in place before its step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0] += torch.rand_like(batch[0])


def test_a_batch_that_a_callback_changes_before_its_step_is_no_difference(tmp_path, capfd):
    """The batch to come is noted at a stop, before a callback has changed it."""
    alone = fit(tmp_path / "alone", AddsNoise())
    with interrupted():
        fit(tmp_path / "stopped", AddsNoise(), At("batch 3", press_ctrl_c))
    capfd.readouterr()
    assert equal(fit(tmp_path / "stopped", AddsNoise()), alone)
    output = "".join(capfd.readouterr())
    assert "resuming from step 3" in output and "differs" not in output
