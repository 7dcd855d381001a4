"""What a message says of a difference between a resumed run and the interrupted one.

What may be its cause is known here as far as settings and the machine have changed. Who knows where
else to look adds a search (drill/causes.py does).
"""

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning import Trainer

from sagemaker_lightning.contract.job_summary import masked

MAX_CAUSES = 3  # causes that are named


class DifferenceKind(StrEnum):
    """What differs between a step and the interrupted run's; messages have the value."""

    LENGTH = "length"
    """The number of batches of an epoch."""
    BATCH = "batch"
    RATE = "learning rate"
    LOSS = "loss"


UNKNOWN_CAUSES = {
    DifferenceKind.BATCH: (
        "something in the data that no seed decides: time, another library's generator, "
        "files that changed, or a sampler that training changes within an epoch"
    ),
    DifferenceKind.RATE: "what sets the learning rate, which is another value",
    DifferenceKind.LOSS: "state that no checkpoint holds, or a kernel that is not deterministic",
}
"""By the kind of a difference: its likely cause if no search finds one."""

Search = Callable[[Trainer, DifferenceKind], Iterable[str]]
_searches: list[Search] = []


def search_by(search: Search) -> None:
    """Let a search name likely causes from now on.

    Args:
        search: Is called with a trainer and BATCH, RATE or LOSS, and returns causes.
    """
    if search not in _searches:
        _searches.append(search)


def describe_machine(trainer: Trainer) -> str:
    """Return what the last bits of a run depend on besides its settings.

    The text is for `describe_changes`. It has the versions of torch and Lightning, the threads, the
    device and the processor.
    """
    device = trainer.strategy.root_device
    properties = {
        "torch": torch.__version__,
        "Lightning": pl.__version__,
        "threads": torch.get_num_threads(),
    }
    properties["device"] = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    )
    properties["processor"] = _processor()
    return "; ".join(
        f"{name}={str(value).replace(';', ',')[:80]}" for name, value in properties.items()
    )


def describe_changes(flags: list[tuple[str, str, str]], before: str, now: str) -> list[str]:
    """Return a phrase for each flag and machine property that has changed.

    Args:
        flags: The changed flags, each with its value before and now.
        before: What `describe_machine` returned in the interrupted run.
        now: What `describe_machine` returned in this run.
    """
    properties_before, properties_now = (
        dict(entry.partition("=")[::2] for entry in text.split("; ")) for text in (before, now)
    )
    changes = [
        *flags,
        *(
            (name, properties_before[name], value)
            for name, value in properties_now.items()
            if properties_before.get(name, value) != value
        ),
    ]
    return [
        f"{name}, which was {masked(name, before_value)} and is {masked(name, now_value)}"
        for name, before_value, now_value in changes
    ]


def likely_causes(trainer: Trainer, kinds: Collection[DifferenceKind], changes: list[str]) -> str:
    """Return the likely causes of a difference, as a text.

    Args:
        trainer: Lightning's trainer.
        kinds: The kinds of difference.
        changes: What `describe_changes` returned.
    """
    if DifferenceKind.LENGTH in kinds or DifferenceKind.BATCH in kinds:
        kind = DifferenceKind.BATCH
    else:
        kind = DifferenceKind.RATE if DifferenceKind.RATE in kinds else DifferenceKind.LOSS
    causes = [*changes, *(cause for search in _searches for cause in search(trainer, kind))]
    return ", or ".join(causes[:MAX_CAUSES] or [UNKNOWN_CAUSES[kind]])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
