"""Prove each resume: compare repeated steps with those before the interruption.

Each batch leaves digests in a journal (resume/check/journal.py): of the batch, of the learning
rates and of the losses. A run that resumes from a checkpoint reads the steps that the interrupted
run recorded after that checkpoint, and compares its own steps with them. On a GPU, digests stay
until there are some dozens of them, so that no step waits. The ranks exchange their results
together with what they exchange anyway (resume/agreement.py).
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor

from sagemaker_lightning.compat.lightning_loops import (
    epoch_counts,
    fetcher,
    steps_done,
    steps_draw_batches,
)
from sagemaker_lightning.compat.lightning_trainer import callbacks_of
from sagemaker_lightning.contract.errors import UserError, printable
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.data.deterministic import position
from sagemaker_lightning.resume import moments
from sagemaker_lightning.resume.agreement import Comparison
from sagemaker_lightning.resume.check import explanation
from sagemaker_lightning.resume.check.explanation import DifferenceKind
from sagemaker_lightning.resume.check.journal import FETCHED_AHEAD, Journal, Position, Step, read
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.files.entries import ResumeResult
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.resume.same_run import run_settings
from sagemaker_lightning.resume.same_run.differences import first_of
from sagemaker_lightning.state import batch_digest
from sagemaker_lightning.state.batch_digest import LeafDigest
from sagemaker_lightning.state.object_graph import is_library_class

BATCHES_PER_READ = 50  # batches whose digests stay on a GPU before all of them are read at once
SEVERAL = "the numbers in", "the hooks of", "the class or the hooks of"
"""How the names of values begin that are several."""
MAX_CHARACTERS = 1000  # of what was said of an earlier interruption
MAX_NAMES = 20  # of what differs, in a line
RESULTS = [
    {"step": int, "identical": identical, "steps": int, "said": str}
    for identical in (bool, type(None))
]
"""What the result of an interruption consists of."""
SECONDS_PER_READ = 1.0  # after which they are read even if there are fewer, where a step takes long


@dataclass
class Batch:
    """A batch whose digests have not been read yet."""

    step: int
    position: Position
    data: list[LeafDigest]
    rates: list[LeafDigest]
    losses: list[LeafDigest] = field(default_factory=list)

    @property
    def parts(self) -> list[LeafDigest]:
        """All digests: of the batch, of the learning rates, of the losses."""
        return [*self.data, *self.rates, *self.losses]


@dataclass(order=True)
class Difference:
    """The first thing that a rank did differently from the interrupted run."""

    position: Position
    rank: int
    step: int
    what: str
    cause: str


class ResumeCheck:
    """Records this rank's steps and compares them with the interrupted run's.

    Args:
        trainer: Lightning's trainer.
        folder: The folder of the checkpoints.
        gather: Returns the values of all ranks, by rank; all ranks call it.
        strict: Whether a difference ends the job.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: CheckpointDir,
        gather: Callable[[Any], list[Any]],
        strict: bool,
    ) -> None:
        self.trainer = trainer
        self.folder = folder
        self.gather = gather
        self.strict = strict
        self.earlier_results: list[ResumeResult] = []  # the results of earlier interruptions
        self.run_id = b""  # identifies this run, 16 bytes; empty before training
        self.journal: Journal | None = None  # None before training
        self.step = 0  # optimizer step of the checkpoint
        self.changes: list[str] = []  # settings and properties of the machine that have changed
        # Steps that the interrupted run recorded after the checkpoint.
        self.expected: deque[Step] = deque()
        self.reached_expected = False  # whether the first of them was reached
        # Batches that were fetched ahead when the run was stopped.
        self.expected_ahead: dict[Position, Step] = {}
        self.is_open = False  # whether the result of the comparison is still to be printed
        self.has_trained = False  # whether a batch was trained on
        self.identical_steps = 0  # optimizer steps that were identical so far
        self.last_identical_step = 0  # the last of these steps
        self.next_batch_is_identical = (
            False  # whether the batch that was to come next was identical
        )
        self.last_recorded: Position = -1, -1  # position of the last batch in the journal
        self.difference: Difference | None = None
        self.current_batch: Batch | None = None
        self.skipped: Position | None = None  # the last batch that on_train_batch_start skipped
        self.on_gpu: list[Batch] = []  # batches whose digests are on a GPU
        self.on_gpu_since = 0.0  # when the first of them was added, in seconds of time.monotonic()
        # Batches whose digests are being copied from the GPU, the digests, the event of the copy.
        self.being_copied: tuple[list[Batch], Tensor, torch.cuda.Event] | None = None
        self.last_rates: list[Any] = []  # the last learning rates, and their digest
        self.last_rate_digests: list[LeafDigest] = []
        self.lost: Sequence[str] = ()
        self.saved_positions: deque[Position] = deque(maxlen=folder.keep + 1)

    def start(
        self,
        entries: Mapping[str, Any],
        flags: Mapping[str, object],
        comparable: bool,
        lost: Sequence[str] = (),
    ) -> None:
        """Begin the journal and read what is to be compared; all ranks call it.

        Args:
            entries: This package's entries of the checkpoint that training resumes from; empty if
                it starts over.
            flags: All settings by flag.
            comparable: Whether the run is expected to repeat the interrupted one. With another
                number of ranks, nothing is compared.
            lost: The names of what the checkpoint lacks, as lines have named it.
        """
        self.lost = lost
        trainer = self.trainer
        run_id = entries["journal"] if entries else b""
        machine = explanation.describe_machine(trainer)
        recorded: list[Step] = []
        self.run_id = (
            run_id
            if isinstance(run_id, bytes) and len(run_id) == 16
            else self.gather(os.urandom(16))[0]
        )
        epoch, batch = self._position()
        self.saved_positions.append((epoch, batch))
        self.last_recorded = epoch, batch - 1
        if run_id and comparable and entries["world_size"] == trainer.world_size:
            self.step = entries["step"]
            self.is_open = True
            recorded, machine_before, problem = read(
                self.folder.path, run_id, trainer.global_rank, trainer.world_size
            )
            if problem:
                log.warning(f"{problem}; later steps are not compared with it")
            self.changes = explanation.describe_changes(
                run_settings.changed_settings(entries["run"], flags), machine_before, machine
            )
            if not steps_draw_batches(fetcher(trainer)):  # such steps have no batch of their own
                later = [step for step in recorded if step.position >= (epoch, batch)]
                self.expected = deque(step for step in later if step.loss != FETCHED_AHEAD)
                self.expected_ahead = {
                    step.position: step for step in later if step.loss == FETCHED_AHEAD
                }
            self.reached_expected = bool(self.expected) and self.expected[0].position == (
                epoch,
                batch,
            )
        self.journal = Journal(
            self.folder.path, self.run_id, trainer.global_rank, trainer.world_size, machine
        )
        self.journal.start_file(recorded)

    @property
    def _begun_journal(self) -> Journal:
        """The journal of a training that has begun."""
        assert self.journal is not None
        return self.journal

    def continue_results(self, results: Sequence[ResumeResult]) -> None:
        """Begin the list of results with those of earlier interruptions.

        Args:
            results: What `results` returned when the checkpoint was saved.
        """
        self.earlier_results = [
            {**result, "said": printable(result["said"])[:MAX_CHARACTERS]}
            for result in results
            if isinstance(result, dict)
            and {name: type(value) for name, value in result.items()} in RESULTS
        ]

    def check_restored(self, differing: Mapping[str, str]) -> None:
        """Report saved values that are missing or different; all ranks call it.

        Args:
            differing: The names of these values on this rank, and for each why it may be another
                one; "" if that is not known.

        Raises:
            UserError: There is a difference on any rank, and `strict` is set.
        """
        if differing and self.is_open:
            names = list(differing)
            hidden = len(names) - MAX_NAMES
            rest = f" (and {hidden} more)" if hidden > 0 else ""
            verb = "differ" if len(names) > 1 or names[0].startswith(SEVERAL) else "differs"
            description = f"{', '.join(names[:MAX_NAMES])}{rest} {verb}"
            cause = (
                ", or ".join(self.changes[:3])
                or next(filter(None, differing.values()), "")
                or "a renamed attribute, or a hook that sets it again"
            )
            self.difference = Difference(
                self._position(), self.trainer.global_rank, self.step, description, cause
            )
        self.report_difference()

    def begin_batch(self, batch: Any, number: int) -> None:
        """Record a batch as training_step gets it, and the learning rates.

        Args:
            batch: The batch.
            number: Its number in the epoch, from 0.
        """
        epoch = epoch_counts(self.trainer).processed
        if self.current_batch:
            self.skipped = self.current_batch.position
        self.current_batch = Batch(
            steps_done(self.trainer) + 1,
            (epoch, number),
            batch_digest.leaf_digests(batch),
            self._rate_digests(),
        )
        if expected := self.expected_ahead.pop((epoch, number + 1), None):
            self._compare_fetched_ahead(expected)

    def record_loss(self, loss: Tensor) -> None:
        """Record a loss."""
        if self.current_batch:
            self.current_batch.losses.append(batch_digest.float_bits(loss))

    def end_batch(self, outputs: Any) -> None:
        """Finish the record of a batch.

        Args:
            outputs: What training_step returned. Its loss counts if `record_loss` was not called
                for this batch.
        """
        if not (batch := self.current_batch):
            return
        if not batch.losses:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, Tensor):
                batch.losses.append(batch_digest.float_bits(loss))
        self.current_batch = None
        self.has_trained = True
        if not self.on_gpu and not self.being_copied:
            parts = batch.parts
            if not any(isinstance(part, Tensor) for part in parts):
                self._record(batch, [int(part) for part in parts])
                return
        self.on_gpu_since = self.on_gpu_since if self.on_gpu else time.monotonic()
        self.on_gpu.append(batch)
        if self.being_copied and self.being_copied[-1].query():
            self._receive()
        if not self.being_copied and (
            len(self.on_gpu) >= BATCHES_PER_READ
            or time.monotonic() - self.on_gpu_since > SECONDS_PER_READ
        ):
            self._send()

    def read_digests(self) -> None:
        """Read all digests; on a GPU, this waits for the computation."""
        while self.being_copied or self.on_gpu:
            if not self.being_copied:
                self._send()
            if self.being_copied:
                self.being_copied[-1].synchronize()
                self._receive()

    @property
    def comparison(self) -> Comparison:
        """How far the comparison has come on this rank."""
        if self.difference:
            return Comparison.DIFFERENT
        return Comparison.OPEN if self.expected else Comparison.IDENTICAL

    def checkpoint_saved(self, point: ResumePoint) -> None:
        """Write the journal to disk after a checkpoint.

        Steps before the oldest checkpoint that is kept are removed from it.

        Args:
            point: When the checkpoint was saved.
        """
        epoch, batch = self._position()
        self.saved_positions.append((epoch, 0 if point is ResumePoint.EPOCH else batch))
        journal = self._begun_journal
        journal.write()
        journal.remove_before(self.saved_positions[0])
        if problem := journal.take_problem():
            log.warning(
                f"the journal {journal.path} cannot be written ({problem}); the steps after an "
                "interruption cannot be compared"
            )

    def finish(self, point: ResumePoint | None = None) -> None:
        """Report the result if it is still open, and write everything; all ranks call it.

        Args:
            point: Where training was stopped; None at the end of training.
        """
        if not self.journal:
            return
        self.read_digests()
        if self.is_open and self.has_trained:
            self.report()
        if point in (ResumePoint.BATCH, ResumePoint.VALIDATION):
            self._record_next_batch(point)
        self.journal.close()

    @property
    def results(self) -> list[ResumeResult]:
        """The result of each interruption; of the last one, as far as this rank knows it."""
        has_result = self.is_open and (self.has_trained or self.difference)
        return [
            *self.earlier_results,
            *(
                [self._verdict(self.identical_steps, self.next_batch_is_identical, self.difference)]
                if has_result
                else []
            ),
        ]

    def report_difference(self) -> None:
        """Report the result now if any rank has found a difference; all ranks call it."""
        self.read_digests()
        if self.is_open and max(self.gather(self.comparison)) == Comparison.DIFFERENT:
            self.report()

    def report_if_decided(self, comparison: Comparison) -> None:
        """Report the result if all ranks have compared all steps, or one has found a difference.

        All ranks call it.

        Args:
            comparison: The greatest of all ranks.
        """
        if self.is_open and self.has_trained and comparison is not Comparison.OPEN:
            self.report()

    def report(self) -> None:
        """Report the result of the comparison; all ranks call it, once.

        Raises:
            UserError: There is a difference, and `strict` is set.
        """
        self.read_digests()
        self.is_open = False
        results = self.gather((self.identical_steps, self.next_batch_is_identical, self.difference))
        steps = min(steps for steps, *_ in results)
        announced = all(is_announced for _, is_announced, _ in results)
        verdict = self._verdict(
            steps,
            announced,
            min((difference for *_, difference in results if difference), default=None),
        )
        self.earlier_results.append(verdict)
        self.expected.clear()
        line = f"resumed at step {self.step}: {verdict['said']}"
        if verdict["identical"] is False and self.strict:
            raise UserError(f"--resume.strict: {line}")
        if verdict["identical"] is False:
            # From here on the run is another one: no rank may compare with the old run's later
            # steps.
            self._begun_journal.remove_after(self.last_recorded)
        if self.trainer.is_global_zero:
            if verdict["identical"] is False:
                log.warning(line)
            else:
                log.info(line)

    def close(self) -> None:
        """Write what is known without waiting for a GPU, and close the journal."""
        if self.journal:
            self.journal.close()

    def _record_next_batch(self, point: ResumePoint) -> None:
        """Record the batch that would come next, and the one after it.

        This process is about to exit, so that drawing another batch disturbs nothing. The one after
        it is what Lightning fetches before the step; the next one itself may be in the checkpoint.
        """
        # The user's code may raise anything here. The checkpoint is written already.
        with contextlib.suppress(Exception):
            digests = batch_digest.leaf_digests(moments.next_batch(self.trainer))
            # The end of a validation may still change the learning rates and the data.
            is_final = point is not ResumePoint.VALIDATION
            has_rates = is_final and not _callbacks_run_before_steps(self.trainer)
            upcoming = Batch(
                steps_done(self.trainer) + 1,
                self._position(),
                digests,
                self._rate_digests() if has_rates else [],
            )
            records = [
                _journal_step(upcoming, [int(part) for part in upcoming.parts], announced=True)
            ]
            if is_final and (ahead_digest := self._digest_of_fetched_ahead()):
                epoch, batch = upcoming.position
                records.append(
                    Step(upcoming.step, epoch, batch + 1, ahead_digest, 0, FETCHED_AHEAD)
                )
            for record in records:
                # A run that was killed before this one may have trained on it, and says more.
                if record.position not in self._begun_journal.records:
                    self._begun_journal.add(record)

    def _digest_of_fetched_ahead(self) -> int:
        """Return the digest of the batch that Lightning has fetched ahead.

        It is of the batch as the loader returned it; 0 if Lightning has fetched none.
        """
        batches = getattr(fetcher(self.trainer), "batches", None)
        return (
            batch_digest.combine(map(int, batch_digest.leaf_digests(batches[0][0])))
            if batches
            else 0
        )

    def _compare_fetched_ahead(self, expected: Step) -> None:
        """Compare the batch that Lightning has fetched ahead with the recorded one."""
        if (
            self.is_open
            and not self.difference
            and self._digest_of_fetched_ahead() != expected.data
        ):
            cause = explanation.likely_causes(self.trainer, (DifferenceKind.BATCH,), self.changes)
            self.difference = Difference(
                expected.position,
                self.trainer.global_rank,
                expected.step + 1,
                "the batch differs",
                cause,
            )

    def _verdict(self, steps: int, announced: bool, first: Difference | None) -> ResumeResult:
        """Return the result of an interruption as model.json has it.

        Args:
            steps: Optimizer steps that were identical.
            announced: Whether the batch that was to come next was identical.
            first: The first difference, if there is one.
        """
        identical: bool | None = True
        steps_are = "the next step is" if steps == 1 else f"the next {steps} steps are"
        if first:
            identical = False
            subject = "the state" if first.step == self.step else f"step {first.step}"
            text = (
                f"{subject} is not that of the interrupted run: on rank {first.rank}, {first.what}"
            )
            text += f"; likely because of {first.cause}; the run may end with other weights"
        elif steps:
            that = "that" if steps == 1 else "those"
            text = f"{steps_are} {that} of the interrupted run, bit for bit"
        elif announced:
            text = (
                "the state is as it was saved, and the next batch is the expected one, bit for bit"
            )
        else:
            identical = None
            text = (
                "the state is as it was saved; the interrupted run recorded no later step to "
                "compare with"
            )
        if self.lost and not first:
            text += f"; no checkpoint has {first_of([*map(str, self.lost)])}"
        return {"step": self.step, "identical": identical, "steps": steps, "said": text}

    def _record(self, batch: Batch, numbers: list[int]) -> None:
        """Compare a batch with the expected step and write it to the journal.

        Args:
            batch: The batch.
            numbers: Its digests as numbers.
        """
        step = _journal_step(batch, numbers)
        self._compare(step)
        # With `strict`, a difference ends the job. The next attempt is compared with the same
        # steps.
        if not (self.strict and self.difference):
            self._begun_journal.add(step)
            self.last_recorded = step.position

    def _compare(self, step: Step) -> None:
        """Compare a step with the expected one."""
        if not self.is_open or not self.expected:
            return
        if self.difference and self.difference.position <= step.position:
            return
        expected = self.expected[0]
        if not self.reached_expected and step.position < expected.position:
            return  # the journal does not have this step any more
        self.reached_expected = True
        self.expected.popleft()
        if not expected.loss and expected.position == self.skipped:
            return  # it was to come, but no run trains on it
        is_announced = not expected.loss
        if (
            is_announced
            and expected.data != step.data
            and _callbacks_run_before_steps(self.trainer)
        ):
            return  # they may have changed it since; it was noted before they could
        description, kinds = _difference(expected, step)
        if kinds:
            cause = explanation.likely_causes(self.trainer, kinds, self.changes)
            self.difference = Difference(
                step.position, self.trainer.global_rank, step.step, description, cause
            )
        elif expected.loss:
            self.identical_steps += step.step != self.last_identical_step
            self.last_identical_step = step.step
        else:
            self.next_batch_is_identical = True

    def _send(self) -> None:
        """Start copying the digests from a GPU; on another device, wait for them."""
        batches = self.on_gpu
        self.on_gpu = []
        numbers = [part for batch in batches for part in batch.parts if isinstance(part, Tensor)]
        if not numbers:
            for batch in batches:
                self._record(batch, [int(part) for part in batch.parts])
            return
        device = self.trainer.strategy.root_device
        values = torch.stack([number.to(device, non_blocking=True) for number in numbers])
        if values.is_cuda:
            event = torch.cuda.Event()
            values = values.to("cpu", non_blocking=True)  # into memory that torch pins for the copy
            event.record()
            self.being_copied = batches, values, event
        else:
            self._record_all(batches, values)

    def _receive(self) -> None:
        """Record the batches whose digests have arrived from the GPU."""
        assert self.being_copied is not None
        batches, values, _ = self.being_copied
        self.being_copied = None
        self._record_all(batches, values)

    def _record_all(self, batches: list[Batch], values: Tensor) -> None:
        """Record batches, given their digests that were on a device as one tensor."""
        numbers = iter(values.tolist())
        for batch in batches:
            self._record(
                batch, [next(numbers) if isinstance(part, Tensor) else part for part in batch.parts]
            )

    def _rate_digests(self) -> list[LeafDigest]:
        """Return the digests of the learning rates.

        It is one digest of all of them. If a learning rate is a tensor, it is one for each.
        """
        rates = [
            group.get("lr")
            for optimizer in self.trainer.optimizers
            for group in optimizer.param_groups
        ]
        if any(isinstance(rate, Tensor) for rate in rates):
            return [batch_digest.float_bits(rate) for rate in rates if rate is not None]
        if rates != self.last_rates:
            self.last_rates = rates
            self.last_rate_digests = [
                batch_digest.combine(
                    int(batch_digest.float_bits(rate)) for rate in rates if rate is not None
                )
            ]
        return self.last_rate_digests

    def _position(self) -> Position:
        return position(self.trainer)


def _callbacks_run_before_steps(trainer: Trainer) -> bool:
    """Return whether a callback of the user's may change rates, or a batch, before each step."""
    return any(
        type(each).on_train_batch_start is not Callback.on_train_batch_start
        and not is_library_class(type(each))
        for each in callbacks_of(trainer)
    )


def _journal_step(batch: Batch, numbers: list[int], announced: bool = False) -> Step:
    """Return the journal's entry for a batch, given its digests as numbers."""
    ends = len(batch.data), len(batch.data) + len(batch.rates)
    data = numbers[: ends[0]]
    rates = numbers[ends[0] : ends[1]]
    losses = numbers[ends[1] :]
    loss = 0 if announced else batch_digest.combine(losses)
    return Step(
        batch.step,
        *batch.position,
        batch_digest.combine(data),
        batch_digest.combine(rates) if rates else 0,
        loss,
    )


def _difference(before: Step, now: Step) -> tuple[str, list[DifferenceKind]]:
    """Return what differs, in words, and the kinds of difference; "" and [] if nothing does."""
    if before.position != now.position:
        if now.position < before.position:
            found = "the interrupted run did not have it"
        else:
            found = f"only the interrupted run had batch {before.batch} of epoch {before.epoch}"
        return f"{found} (an epoch has another length)", [DifferenceKind.LENGTH]
    has_changed = {
        DifferenceKind.BATCH: before.data != now.data,
        DifferenceKind.RATE: before.rates not in (0, now.rates),
        DifferenceKind.LOSS: before.loss not in (0, now.loss),
    }
    kinds = [kind for kind, differs in has_changed.items() if differs]
    words = " and ".join(f"the {kind}" for kind in kinds)
    return f"{words} {'differ' if len(kinds) > 1 else 'differs'}" if kinds else "", kinds
