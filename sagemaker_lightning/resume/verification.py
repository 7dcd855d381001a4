"""Prove each resume: compare repeated steps with those before the interruption.

Each batch leaves digests in a journal (resume/journal.py): of the batch, of the learning rates and
of the losses. A run that resumes from a checkpoint reads the steps that the interrupted run
recorded after that checkpoint, and compares its own steps with them. On a GPU, digests stay until
there are some dozens of them, so that no step waits. The ranks exchange their results together with
what they exchange anyway (resume/agreement.py).
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from sagemaker_lightning.compat.lightning_loops import fetcher, is_drawn_by_steps
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.data.deterministic import position
from sagemaker_lightning.resume import (
    difference_causes,
    fit_loops,
    restore_check,
    run_settings,
)
from sagemaker_lightning.resume.agreement import OTHER, SAME, UNSURE
from sagemaker_lightning.resume.checkpoint_dir import Folder
from sagemaker_lightning.resume.journal import AHEAD, Journal, Place, Step, read
from sagemaker_lightning.state import batch_digest
from sagemaker_lightning.state.batch_digest import Part

EVERY = 50  # batches whose digests stay on a GPU before all of them are read at once
SECONDS = 1.0  # after which they are read even if there are fewer, where a step takes long


@dataclass
class Batch:
    """A batch whose digests have not been read yet."""

    step: int
    place: Place
    data: list[Part]
    rates: list[Part]
    losses: list[Part] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        """All digests: of the batch, of the learning rates, of the losses."""
        return [*self.data, *self.rates, *self.losses]


@dataclass(order=True)
class Difference:
    """The first thing that a rank did differently from the interrupted run."""

    place: Place
    rank: int
    step: int
    what: str
    cause: str


class Proof:
    """Records this rank's steps and compares them with the interrupted run's.

    Args:
        trainer: Lightning's trainer.
        folder: The folder of the checkpoints.
        gather: Returns the values of all ranks, by rank; all ranks call it.
        strict: Whether a difference ends the job.
    """

    def __init__(
        self, trainer: Trainer, folder: Folder, gather: Callable[[Any], list], strict: bool
    ) -> None:
        self.trainer = trainer
        self.folder = folder
        self.gather = gather
        self.strict = strict
        self.told: list[dict[str, Any]] = []  # the results of earlier interruptions
        self.run = b""  # identifies this run, 16 bytes; empty before training
        self.step = 0  # optimizer step of the checkpoint
        self.changes: list[str] = []  # settings and properties of the machine that have changed
        # Steps that the interrupted run recorded after the checkpoint.
        self.expected: deque[Step] = deque()
        self.begun = False  # whether the first of them was reached
        # Batches that were fetched ahead when the run was stopped.
        self.ahead: dict[Place, Step] = {}
        self.untold = False  # whether the result of the comparison is still to be printed
        self.trained = False  # whether a batch was trained on
        self.steps = 0  # optimizer steps that were identical so far
        self.last = 0  # the last of these steps
        self.announced = False  # whether the batch that was to come next was identical
        self.latest: Place = -1, -1  # position of the last batch in the journal
        self.difference: Difference | None = None
        self.now: Batch | None = None
        self.waiting: list[Batch] = []  # batches whose digests are on a GPU
        self.since = 0.0  # when the first of them was added, in seconds of time.monotonic()
        # Batches whose digests are being copied from the GPU, the digests, the event of the copy.
        self.copied: tuple[list[Batch], Tensor, torch.cuda.Event] | None = None
        self.rates: tuple[list, list[Part]] = [], []  # the last learning rates and their digest
        self.saves: deque[Place] = deque(maxlen=folder.keep + 1)

    def start(self, meta: Mapping[str, Any], flags: Mapping[str, object], comparable: bool) -> None:
        """Begin the journal and read what is to be compared; all ranks call it.

        Args:
            meta: This package's entries of the checkpoint that training resumes from; empty if it
                starts anew.
            flags: All settings by flag.
            comparable: Whether the run is expected to repeat the interrupted one. With another
                number of ranks, nothing is compared.
        """
        trainer = self.trainer
        run_id = meta.get("journal")
        machine = difference_causes.machine(trainer)
        recorded = []
        self.run = (
            run_id
            if isinstance(run_id, bytes) and len(run_id) == 16
            else self.gather(os.urandom(16))[0]
        )
        epoch, batch = self._position()
        self.saves.append((epoch, batch))
        self.latest = epoch, batch - 1
        if run_id and comparable and meta["world_size"] == trainer.world_size:
            self.step = meta["step"]
            self.untold = True
            recorded, machine_before, problem = read(
                self.folder.path, run_id, trainer.global_rank, trainer.world_size
            )
            self._warn(problem and f"{problem}; what comes after is not compared with it")
            self.changes = difference_causes.changed(
                run_settings.changed(meta["run"], flags), machine_before, machine
            )
            if not is_drawn_by_steps(fetcher(trainer)):  # such steps have no batch of their own
                later = [step for step in recorded if step.place >= (epoch, batch)]
                self.expected = deque(step for step in later if step.loss != AHEAD)
                self.ahead = {step.place: step for step in later if step.loss == AHEAD}
            self.begun = bool(self.expected) and self.expected[0].place == (epoch, batch)
        self.journal = Journal(
            self.folder.path, self.run, trainer.global_rank, trainer.world_size, machine
        )
        self.journal.begin(recorded)

    def look_at(self, lost: list[str]) -> None:
        """Report saved values that are missing or different; all ranks call it.

        Args:
            lost: The names of these values on this rank.

        Raises:
            UserError: There is a difference on any rank, and `strict` is set.
        """
        if lost and self.untold:
            rest = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
            description = f"{', '.join(lost[:3])}{rest} differ"
            cause = (
                ", or ".join(self.changes[:3])
                or (
                    all(name.startswith(restore_check.DATA) for name in lost)
                    and "data that were read or drawn anew, and are others"
                )
                or "a name that has changed, or a hook that sets it anew"
            )
            self.difference = Difference(
                self._position(), self.trainer.global_rank, self.step, description, cause
            )
        self.check()

    def batch(self, batch: Any, number: int) -> None:
        """Record a batch as training_step gets it, and the learning rates.

        Args:
            batch: The batch.
            number: Its number in the epoch, from 0.
        """
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        self.now = Batch(
            self.trainer.global_step + 1,
            (epoch, number),
            batch_digest.parts(batch),
            self._rate_digests(),
        )
        if expected := self.ahead.pop((epoch, number + 1), None):
            self._compare_fetched_ahead(expected)

    def loss(self, loss: Tensor) -> None:
        """Record a loss."""
        if self.now:
            self.now.losses.append(batch_digest.bits(loss))

    def end(self, outputs: Any) -> None:
        """Finish the record of a batch.

        Args:
            outputs: What training_step returned. Its loss counts if `loss` was not called for this
                batch.
        """
        if not (batch := self.now):
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not batch.losses and isinstance(loss, Tensor):
            batch.losses.append(batch_digest.bits(loss))
        self.now = None
        self.trained = True
        if not self.waiting and not self.copied:
            parts = batch.parts
            if all(type(part) is int for part in parts):
                self._record(batch, parts)
                return
        self.since = self.since if self.waiting else time.monotonic()
        self.waiting.append(batch)
        if self.copied and self.copied[-1].query():
            self._receive()
        if not self.copied and (
            len(self.waiting) >= EVERY or time.monotonic() - self.since > SECONDS
        ):
            self._send()

    def settle(self) -> None:
        """Read all digests; on a GPU, this waits for the computation."""
        while self.copied or self.waiting:
            if not self.copied:
                self._send()
            if self.copied:
                self.copied[-1].synchronize()
                self._receive()

    @property
    def doubt(self) -> int:
        """How far the comparison has come on this rank: SAME, UNSURE or OTHER."""
        if self.difference:
            return OTHER
        return UNSURE if self.expected else SAME

    def saved(self, kind: str) -> None:
        """Write the journal to disk after a checkpoint.

        Steps before the oldest checkpoint that is kept are removed from it.

        Args:
            kind: When the checkpoint was saved: "batch", "validation" or "epoch".
        """
        self.saves.append((self._position()[0], 0) if kind == "epoch" else self._position())
        self.journal.write()
        self.journal.keep(self.saves[0])
        self._warn(
            self.journal.problem
            and f"the journal {self.journal.path} cannot be written "
            f"({self.journal.problem}); what comes after an interruption will not be compared"
        )
        self.journal.problem = ""

    def finish(self, kind: str = "") -> None:
        """Report the result if it is still open, and write everything; all ranks call it.

        Args:
            kind: Where training was stopped: "batch", "validation" or "epoch"; "" at the end of
                training.
        """
        if not self.run:
            return
        self.settle()
        if self.untold and self.trained:
            self.tell()
        if kind in ("batch", "validation"):
            self._record_next_batch(kind)
        self.journal.close()

    @property
    def resumes(self) -> list[dict[str, Any]]:
        """The result of each interruption; of the last one, as far as this rank knows it."""
        has_result = self.untold and (self.trained or self.difference)
        return [
            *self.told,
            *([self._verdict(self.steps, self.announced, self.difference)] if has_result else []),
        ]

    def check(self) -> None:
        """Report the result now if any rank has found a difference; all ranks call it."""
        self.settle()
        if self.untold and max(self.gather(self.doubt)) == OTHER:
            self.tell()

    def tell(self) -> None:
        """Report the result of the comparison; all ranks call it, once.

        Raises:
            UserError: There is a difference, and `strict` is set.
        """
        self.settle()
        self.untold = False
        results = self.gather((self.steps, self.announced, self.difference))
        steps = min(steps for steps, *_ in results)
        announced = all(is_announced for _, is_announced, _ in results)
        verdict = self._verdict(
            steps,
            announced,
            min((difference for *_, difference in results if difference), default=None),
        )
        self.told.append(verdict)
        self.expected.clear()
        line = f"resumed at step {self.step}: {verdict['said']}"
        if verdict["identical"] is False and self.strict:
            raise UserError(f"--resume.strict: {line}")
        if verdict["identical"] is False:
            # From here on the run is another one: no rank may compare with the old run's later
            # steps.
            self.journal.forget_after(self.latest)
        if self.trainer.is_global_zero:
            print(f"warning: {line}" if verdict["identical"] is False else line, flush=True)

    def close(self) -> None:
        """Write what is known without waiting for a GPU, and close the journal."""
        if self.run:
            self.journal.close()

    def _record_next_batch(self, kind: str) -> None:
        """Record the batch that would come next, and the one after it.

        This process is about to exit, so that drawing another batch disturbs nothing. The one after
        it is what Lightning fetches before the step; the next one itself may be in the checkpoint.
        """
        # The user's code may raise anything here. The checkpoint is written already.
        with contextlib.suppress(Exception):
            upcoming = Batch(
                self.trainer.global_step + 1,
                self._position(),
                batch_digest.parts(fit_loops.next_batch(self.trainer)),
                [],
            )
            # The end of a validation may still change the learning rates and the data.
            if kind != "validation":
                upcoming.rates = self._rate_digests()
            self.journal.add(
                _journal_step(upcoming, [int(part) for part in upcoming.parts], announced=True)
            )
            if kind != "validation" and (ahead_digest := self._digest_of_fetched_ahead()):
                epoch, batch = upcoming.place
                self.journal.add(Step(upcoming.step, epoch, batch + 1, ahead_digest, 0, AHEAD))

    def _digest_of_fetched_ahead(self) -> int:
        """Return the digest of the batch that Lightning has fetched ahead.

        It is of the batch as the loader returned it; 0 if Lightning has fetched none.
        """
        batches = getattr(fetcher(self.trainer), "batches", None)
        return batch_digest.folded(map(int, batch_digest.parts(batches[0][0]))) if batches else 0

    def _compare_fetched_ahead(self, expected: Step) -> None:
        """Compare the batch that Lightning has fetched ahead with the recorded one."""
        if self.untold and not self.difference and self._digest_of_fetched_ahead() != expected.data:
            cause = difference_causes.likely(self.trainer, ("batch",), self.changes)
            self.difference = Difference(
                expected.place,
                self.trainer.global_rank,
                expected.step + 1,
                "the batch differs",
                cause,
            )

    def _verdict(self, steps: int, announced: bool, first: Difference | None) -> dict[str, Any]:
        """Return the result of an interruption as model.json has it.

        Args:
            steps: Optimizer steps that were identical.
            announced: Whether the batch that was to come next was identical.
            first: The first difference, if there is one.
        """
        identical = True
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
                "the state is as it was saved, and the next batch the one that was to come, bit "
                "for bit"
            )
        else:
            identical = None
            text = "the state is as it was saved; no step after it is known that could be compared"
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
            self.journal.add(step)
            self.latest = step.place

    def _compare(self, step: Step) -> None:
        """Compare a step with the expected one."""
        if not self.untold or not self.expected:
            return
        if self.difference and self.difference.place <= step.place:
            return
        expected = self.expected[0]
        if not self.begun and step.place < expected.place:
            return  # the journal does not have this step any more
        self.begun = True
        self.expected.popleft()
        if difference := _difference(expected, step):
            cause = difference_causes.likely(self.trainer, difference[1:], self.changes)
            self.difference = Difference(
                step.place, self.trainer.global_rank, step.step, difference[0], cause
            )
            self.expected.clear()
        elif expected.loss:
            self.steps += step.step != self.last
            self.last = step.step
        else:
            self.announced = True

    def _send(self) -> None:
        """Start copying the digests from a GPU; on another device, wait for them."""
        batches = self.waiting
        self.waiting = []
        numbers = [part for batch in batches for part in batch.parts if isinstance(part, Tensor)]
        if not numbers:
            for batch in batches:
                self._record(batch, batch.parts)
            return
        device = self.trainer.strategy.root_device
        values = torch.stack([number.to(device, non_blocking=True) for number in numbers])
        if values.is_cuda:
            event = torch.cuda.Event()
            values = values.to("cpu", non_blocking=True)  # into memory that torch pins for the copy
            event.record()
            self.copied = batches, values, event
        else:
            self._record_all(batches, values)

    def _receive(self) -> None:
        """Record the batches whose digests have arrived from the GPU."""
        batches, values, _ = self.copied
        self.copied = None
        self._record_all(batches, values)

    def _record_all(self, batches: list[Batch], values: Tensor) -> None:
        """Record batches, given their digests that were on a device as one tensor."""
        numbers = iter(values.tolist())
        for batch in batches:
            self._record(
                batch, [next(numbers) if isinstance(part, Tensor) else part for part in batch.parts]
            )

    def _rate_digests(self) -> list[Part]:
        """Return the digests of the learning rates.

        It is one digest of all of them. If a learning rate is a tensor, it is one for each.
        """
        rates = [
            group.get("lr")
            for optimizer in self.trainer.optimizers
            for group in optimizer.param_groups
        ]
        if any(isinstance(rate, Tensor) for rate in rates):
            return [batch_digest.bits(rate) for rate in rates if rate is not None]
        if rates != self.rates[0]:
            self.rates = (
                rates,
                [
                    batch_digest.folded(
                        batch_digest.bits(rate) for rate in rates if rate is not None
                    )
                ],
            )
        return self.rates[1]

    def _position(self) -> Place:
        return position(self.trainer)

    def _warn(self, text: str) -> None:
        if text:
            print(f"warning: {text}", flush=True)


def _journal_step(batch: Batch, numbers: list[int], announced: bool = False) -> Step:
    """Return the journal's entry for a batch, given its digests as numbers."""
    ends = len(batch.data), len(batch.data) + len(batch.rates)
    data = numbers[: ends[0]]
    rates = numbers[ends[0] : ends[1]]
    losses = numbers[ends[1] :]
    loss = 0 if announced else batch_digest.folded(losses)
    return Step(
        batch.step,
        *batch.place,
        batch_digest.folded(data),
        batch_digest.folded(rates) if rates else 0,
        loss,
    )


def _difference(before: Step, now: Step) -> tuple[str, ...]:
    """Return what differs, in words, followed by the kinds of difference.

    The kinds are "length", or "batch", "learning rate" and "loss". The result is empty if nothing
    differs.
    """
    if before.place != now.place:
        subject = (
            "it" if now.place < before.place else f"batch {before.batch} of epoch {before.epoch}"
        )
        whose = (
            "the interrupted run did not have"
            if now.place < before.place
            else "only the interrupted run had"
        )
        return f"{whose} {subject} (an epoch has another length)", "length"
    has_changed = {
        "batch": before.data != now.data,
        "learning rate": before.rates not in (0, now.rates),
        "loss": before.loss not in (0, now.loss),
    }
    names = [name for name, differs in has_changed.items() if differs]
    words = " and ".join(f"the {name}" for name in names)
    return (f"{words} {'differ' if len(names) > 1 else 'differs'}", *names) if names else ()
