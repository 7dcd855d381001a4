"""Every resume proves itself: what is done again is compared with what was done before the interruption.

Each batch leaves digests in a journal (resume/journal.py): of the batch, of the learning rates and of the losses. A run
that goes on from a checkpoint reads what was noted after it, and compares. On a GPU, digests stay until there are some
dozens of them, so that no step waits; and what the ranks have found is told with what they agree on anyway.
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
from sagemaker_lightning.resume import difference_causes, fit_loops, run_settings
from sagemaker_lightning.resume.agreement import OTHER, SAME, UNSURE
from sagemaker_lightning.resume.checkpoint_dir import Folder
from sagemaker_lightning.resume.journal import AHEAD, Journal, Place, Step, read
from sagemaker_lightning.state import batch_digest
from sagemaker_lightning.state.batch_digest import Part

EVERY = 50  # batches whose digests stay on a GPU before they are read, all at once
SECONDS = 1.0  # within which they are read, where a step takes long


@dataclass
class Batch:
    """A batch of which the digests are not read yet."""

    step: int
    place: Place
    data: list[Part]
    rates: list[Part]
    losses: list[Part] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        """All of them."""
        return [*self.data, *self.rates, *self.losses]


@dataclass(order=True)
class Difference:
    """The first thing that a rank did otherwise than before."""

    place: Place
    rank: int
    step: int
    what: str
    cause: str


class Proof:
    """Notes what this rank does, and compares it with what was noted before an interruption.

    Args:
        trainer: Lightning's trainer.
        folder: The folder of the checkpoints.
        gather: Gives each rank what all say.
        strict: Whether a difference ends the job.
    """

    def __init__(self, trainer: Trainer, folder: Folder, gather: Callable[[Any], list], strict: bool) -> None:
        self.trainer, self.folder, self.gather, self.strict = trainer, folder, gather, strict
        self.told: list[dict[str, Any]] = []  # what came of earlier interruptions
        self.run = b""  # tells this run from others; none before training
        self.step = 0  # of the checkpoint
        self.changes: list[str] = []  # what was otherwise, of the settings and of the machine
        self.expected: deque[Step] = deque()  # what was noted after the checkpoint
        self.begun = False  # whether the first of it was reached
        self.ahead: dict[Place, Step] = {}  # what was fetched ahead when the run was stopped
        self.untold, self.trained = False, False  # whether there is a verdict to come, and a batch was trained on
        self.steps, self.last, self.announced = 0, 0, False  # what was alike so far
        self.latest: Place = -1, -1  # of what was noted
        self.difference: Difference | None = None
        self.now: Batch | None = None
        self.waiting: list[Batch] = []  # whose digests are on a GPU
        self.since = 0.0  # when the first of them came
        self.copied: tuple[list[Batch], Tensor, torch.cuda.Event] | None = None  # on their way from it
        self.rates: tuple[list, list[Part]] = [], []
        self.saves: deque[Place] = deque(maxlen=folder.keep + 1)

    def start(self, meta: Mapping[str, Any], flags: Mapping[str, object], comparable: bool) -> None:
        """Begin; all ranks call it.

        Args:
            meta: What is ours in the checkpoint that training goes on from; empty if it starts.
            flags: All settings by flag.
            comparable: Whether the run is to go on as it was. With another number of ranks, it cannot.
        """
        trainer = self.trainer
        run, machine, known = meta.get("journal"), difference_causes.machine(trainer), []
        self.run = run if isinstance(run, bytes) and len(run) == 16 else self.gather(os.urandom(16))[0]
        epoch, batch = self._place()
        self.saves.append((epoch, batch))
        self.latest = epoch, batch - 1
        if run and comparable and meta["world_size"] == trainer.world_size:
            self.step, self.untold = meta["step"], True
            known, before, problem = read(self.folder.path, run, trainer.global_rank, trainer.world_size)
            self._warn(problem and f"{problem}; what comes after is not compared with it")
            self.changes = difference_causes.changed(run_settings.changed(meta["run"], flags), before, machine)
            if not is_drawn_by_steps(fetcher(trainer)):  # these steps have no batch
                later = [step for step in known if step.place >= (epoch, batch)]
                self.expected = deque(step for step in later if step.loss != AHEAD)
                self.ahead = {step.place: step for step in later if step.loss == AHEAD}
            self.begun = bool(self.expected) and self.expected[0].place == (epoch, batch)
        self.journal = Journal(self.folder.path, self.run, trainer.global_rank, trainer.world_size, machine)
        self.journal.begin(known)

    def look_at(self, lost: list[str]) -> None:
        """Say so if there is something that the checkpoint knows and is not there again; all ranks call it."""
        if lost and self.untold:
            more = f" (and {len(lost) - 3} more)" if len(lost) > 3 else ""
            what = f"{', '.join(lost[:3])}{more} differ"
            cause = ", or ".join(self.changes[:3]) or "a name that has changed, or a hook that sets it anew"
            self.difference = Difference(self._place(), self.trainer.global_rank, self.step, what, cause)
        self.check()

    def batch(self, batch: Any, number: int) -> None:
        """Take note of a batch as training_step gets it, and of the learning rates."""
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        self.now = Batch(self.trainer.global_step + 1, (epoch, number), batch_digest.parts(batch), self._rates())
        if expected := self.ahead.pop((epoch, number + 1), None):
            self._look_ahead(expected)

    def loss(self, loss: Tensor) -> None:
        """Take note of a loss."""
        if self.now:
            self.now.losses.append(batch_digest.bits(loss))

    def end(self, outputs: Any) -> None:
        """End a batch, with what training_step returned."""
        if not (now := self.now):
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not now.losses and isinstance(loss, Tensor):
            now.losses.append(batch_digest.bits(loss))
        self.now, self.trained = None, True
        if not self.waiting and not self.copied:
            parts = now.parts
            if all(type(part) is int for part in parts):
                self._note(now, parts)
                return
        self.since = self.since if self.waiting else time.monotonic()
        self.waiting.append(now)
        if self.copied and self.copied[-1].query():
            self._receive()
        if not self.copied and (len(self.waiting) >= EVERY or time.monotonic() - self.since > SECONDS):
            self._send()

    def settle(self) -> None:
        """Read all digests; on a GPU, this waits for it."""
        while self.copied or self.waiting:
            if not self.copied:
                self._send()
            if self.copied:
                self.copied[-1].synchronize()
                self._receive()

    @property
    def doubt(self) -> int:
        """How far the comparison has come on this rank."""
        if self.difference:
            return OTHER
        return UNSURE if self.expected else SAME

    def saved(self, kind: str) -> None:
        """Have the journal on the disk as far as it goes, and forget what lies before the checkpoints that are kept."""
        self.saves.append((self._place()[0], 0) if kind == "epoch" else self._place())
        self.journal.write()
        self.journal.keep(self.saves[0])
        self._warn(self.journal.problem and f"the journal {self.journal.path} cannot be written "
                   f"({self.journal.problem}); what comes after an interruption will not be compared")  # fmt: skip
        self.journal.problem = ""

    def finish(self, kind: str = "") -> None:
        """Say what is not said yet, and write all; all ranks call it, at the end of training or where it is stopped."""
        if not self.run:
            return
        self.settle()
        if self.untold and self.trained:
            self.tell()
        if kind in ("batch", "validation"):
            self._announce(kind)
        self.journal.close()

    @property
    def resumes(self) -> list[dict[str, Any]]:
        """What came of each interruption; of the last one, as far as this rank knows."""
        known = self.untold and (self.trained or self.difference)
        return [*self.told, *([self._verdict(self.steps, self.announced, self.difference)] if known else [])]

    def check(self) -> None:
        """Tell what is known if some rank has found a difference; all ranks call it."""
        self.settle()
        if self.untold and max(self.gather(self.doubt)) == OTHER:
            self.tell()

    def tell(self) -> None:
        """Say, once, what came of the comparison; all ranks call it. UserError where it is to end the job."""
        self.settle()
        self.untold = False
        told = self.gather((self.steps, self.announced, self.difference))
        steps, announced = min(steps for steps, *_ in told), all(one for _, one, _ in told)
        verdict = self._verdict(steps, announced, min((one for *_, one in told if one), default=None))
        self.told.append(verdict)
        self.expected.clear()
        line = f"resumed at step {self.step}: {verdict['said']}"
        if verdict["identical"] is False and self.strict:
            raise UserError(f"--resume.strict: {line}")
        if verdict["identical"] is False:  # what was noted of later steps is that of another run, on all ranks
            self.journal.forget_after(self.latest)
        if self.trainer.is_global_zero:
            print(f"warning: {line}" if verdict["identical"] is False else line, flush=True)

    def close(self) -> None:
        """Write what is known without waiting for a GPU."""
        if self.run:
            self.journal.close()

    def _announce(self, kind: str) -> None:
        """Note the batch that would come next. This process is leaving, so that nothing is disturbed by it.

        And the one after it, which Lightning fetches before the step: the next one itself may be in the checkpoint.
        """
        with contextlib.suppress(Exception):  # of the user's code, whatever it is: the checkpoint is written
            found = Batch(
                self.trainer.global_step + 1, self._place(), batch_digest.parts(fit_loops.next_batch(self.trainer)), []
            )
            if kind != "validation":  # the end of which may change the learning rates, and the data
                found.rates = self._rates()
            self.journal.add(_step(found, [int(part) for part in found.parts], announced=True))
            if kind != "validation" and (data := self._fetched_ahead()):
                epoch, batch = found.place
                self.journal.add(Step(found.step, epoch, batch + 1, data, 0, AHEAD))

    def _fetched_ahead(self) -> int:
        """Return the digest of the batch that Lightning has fetched ahead, as the loader gave it; 0 if it has none."""
        batches = getattr(fetcher(self.trainer), "batches", None)
        return batch_digest.folded(map(int, batch_digest.parts(batches[0][0]))) if batches else 0

    def _look_ahead(self, expected: Step) -> None:
        """Compare the batch that Lightning has fetched ahead with what it was."""
        if self.untold and not self.difference and self._fetched_ahead() != expected.data:
            cause = difference_causes.likely(self.trainer, ("batch",), self.changes)
            self.difference = Difference(
                expected.place, self.trainer.global_rank, expected.step + 1, "the batch differs", cause
            )

    def _verdict(self, steps: int, announced: bool, first: Difference | None) -> dict[str, Any]:
        """Return what model.json says of an interruption."""
        identical, before = True, "the next step is" if steps == 1 else f"the next {steps} steps are"
        if first:
            identical = False
            what = "the state" if first.step == self.step else f"step {first.step}"
            said = f"{what} is not that of the interrupted run: on rank {first.rank}, {first.what}"
            said += f"; likely because of {first.cause}; the run may end with other weights"
        elif steps:
            said = f"{before} {'that' if steps == 1 else 'those'} of the interrupted run, bit for bit"
        elif announced:
            said = "the state is as it was saved, and the next batch the one that was to come, bit for bit"
        else:
            identical, said = None, "the state is as it was saved; no step after it is known that could be compared"
        return {"step": self.step, "identical": identical, "steps": steps, "said": said}

    def _note(self, batch: Batch, numbers: list[int]) -> None:
        """Write a step down, and compare it with what was expected; `numbers` are its parts."""
        step = _step(batch, numbers)
        self._compare(step)
        if not (self.strict and self.difference):  # which ends the job: the next attempt is compared with the same
            self.journal.add(step)
            self.latest = step.place

    def _compare(self, step: Step) -> None:
        """Compare a step with what was expected."""
        if not self.untold or not self.expected:
            return
        if self.difference and self.difference.place <= step.place:
            return
        first = self.expected[0]
        if not self.begun and step.place < first.place:
            return  # what it has to be compared with was forgotten
        self.begun = True
        self.expected.popleft()
        if what := _difference(first, step):
            told = difference_causes.likely(self.trainer, what[1:], self.changes)
            self.difference = Difference(step.place, self.trainer.global_rank, step.step, what[0], told)
            self.expected.clear()
        elif first.loss:
            self.steps += step.step != self.last
            self.last = step.step
        else:
            self.announced = True

    def _send(self) -> None:
        """Begin to copy the digests from a GPU; wait for those of another device."""
        batches, self.waiting = self.waiting, []
        numbers = [part for batch in batches for part in batch.parts if isinstance(part, Tensor)]
        if not numbers:
            for batch in batches:
                self._note(batch, batch.parts)
            return
        device = self.trainer.strategy.root_device
        found = torch.stack([number.to(device, non_blocking=True) for number in numbers])
        if found.is_cuda:
            event = torch.cuda.Event()
            found = found.to("cpu", non_blocking=True)  # into memory that torch pins for that
            event.record()
            self.copied = batches, found, event
        else:
            self._read(batches, found)

    def _receive(self) -> None:
        batches, found, _ = self.copied
        self.copied = None
        self._read(batches, found)

    def _read(self, batches: list[Batch], found: Tensor) -> None:
        numbers = iter(found.tolist())
        for batch in batches:
            self._note(batch, [next(numbers) if isinstance(part, Tensor) else part for part in batch.parts])

    def _rates(self) -> list[Part]:
        rates = [group.get("lr") for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        if any(isinstance(rate, Tensor) for rate in rates):
            return [batch_digest.bits(rate) for rate in rates if rate is not None]
        if rates != self.rates[0]:
            self.rates = rates, [batch_digest.folded(batch_digest.bits(rate) for rate in rates if rate is not None)]
        return self.rates[1]

    def _place(self) -> Place:
        return position(self.trainer)

    def _warn(self, text: str) -> None:
        if text:
            print(f"warning: {text}", flush=True)


def _step(batch: Batch, numbers: list[int], announced: bool = False) -> Step:
    """Return what is written down of a batch, given its parts as numbers."""
    ends = len(batch.data), len(batch.data) + len(batch.rates)
    data, rates, losses = numbers[: ends[0]], numbers[ends[0] : ends[1]], numbers[ends[1] :]
    loss = 0 if announced else batch_digest.folded(losses)
    return Step(batch.step, *batch.place, batch_digest.folded(data), batch_digest.folded(rates) if rates else 0, loss)


def _difference(before: Step, now: Step) -> tuple[str, ...]:
    """Return what differs, in words, and of which kinds it is: "length", "batch", "rate" and "loss"."""
    if before.place != now.place:
        more = "it" if now.place < before.place else f"batch {before.batch} of epoch {before.epoch}"
        whose = "the interrupted run did not have" if now.place < before.place else "only the interrupted run had"
        return f"{whose} {more} (an epoch has another length)", "length"
    found = {"batch": before.data != now.data, "learning rate": before.rates not in (0, now.rates),
             "loss": before.loss not in (0, now.loss)}  # fmt: skip
    names = [name for name, differs in found.items() if differs]
    words = " and ".join(f"the {name}" for name in names)
    return (f"{words} {'differ' if len(names) > 1 else 'differs'}", *names) if names else ()
