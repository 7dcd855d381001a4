"""Lets faults happen to the hosts of one attempt of a job, and ends what lasts."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from sagemaker_lightning.contract.checkpoint_home import CHECKPOINT_NAME
from sagemaker_rehearsal import faults
from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.faults.clocks import SHIFT_SECONDS
from sagemaker_rehearsal.faults.errors import CannotInject
from sagemaker_rehearsal.faults.rules import (
    ANY,
    KINDS,
    LASTING,
    OF_CHECKPOINTS,
    OF_RANKS,
    Fault,
)
from sagemaker_rehearsal.faults.schedule import DueInterruption
from sagemaker_rehearsal.jobs import checkpoint_sync, record

if TYPE_CHECKING:
    from sagemaker_rehearsal.jobs.attempt import Attempt

RANK_FAULTS = {"kill rank": faults.kill, "freeze rank": faults.freeze, "slow rank": faults.slow}
NETWORK_FAULTS = {
    "cut network": faults.cut_network,
    "slow network": faults.slow_network,
    "lossy network": faults.lose_packets,
}


@dataclass
class Lasting:
    """A fault that lasts, and what ends it."""

    fault: record.Fault
    until: float | None
    end: Callable[[], None]


class Injector:
    """Lets faults happen to one attempt.

    Args:
        attempt: The attempt, whose hosts run.
        draw: The source of what is drawn.
    """

    def __init__(self, attempt: "Attempt", draw: random.Random) -> None:
        self.attempt = attempt
        self.draw = draw
        self.lasting: list[Lasting] = []

    def inject(self, fault: Fault, due: DueInterruption) -> list[record.Fault]:
        """Let a fault happen; return what has become of it, on each host."""
        # S3 is the same for all hosts.
        hosts = due.hosts[:1] if fault.kind in OF_CHECKPOINTS else due.hosts
        return [self._inject_into(host, fault) for host in hosts]

    def next(self) -> float | None:
        """Return when the next fault ends, None if none does."""
        return min((each.until for each in self.lasting if each.until is not None), default=None)

    def end_due(self, now: float) -> None:
        """End the faults whose time is over."""
        for each in [each for each in self.lasting if each.until and each.until <= now]:
            self.lasting.remove(each)
            each.end()
            each.fault.end()

    def close(self) -> None:
        """End all faults, because the attempt is over."""
        while self.lasting:
            self.lasting.pop().end()

    def _inject_into(self, host: str, fault: Fault) -> record.Fault:
        """Let a fault happen to a host; one that is drawn is one that is possible."""
        kinds = [fault.kind]
        if fault.kind == ANY:
            kinds = self.draw.sample([*KINDS], len(KINDS))
        why = fault.text if fault.rule else "by hand"
        noted = record.Fault(time.time(), host, fault.kind, "", self.attempt.kept.step, why)
        reasons = []
        for kind in kinds:
            try:
                noted.target, end = self._apply(kind, fault, host)
            except CannotInject as error:
                reasons.append(str(error))
                continue
            noted.kind = kind
            if end and kind in LASTING:
                until = None if fault.seconds is None else time.time() + fault.seconds
                self.lasting.append(Lasting(noted, until, end))
            return noted
        noted.failed = reasons[0] if len(reasons) == 1 else "none of them is possible here"
        return noted

    def _apply(self, kind: str, fault: Fault, host: str) -> tuple[str, Callable[[], None] | None]:
        """Let a fault happen; return what it has hit, and what ends it, if it lasts."""
        if kind in OF_CHECKPOINTS:
            return self._damage_checkpoint(kind), None
        pid = self.attempt.running[host].container.first_process()
        if pid is None:
            raise CannotInject(f"no process of {host} is on this machine")
        if kind in OF_RANKS:
            ranks = faults.find_ranks(pid)
            number = fault.rank
            if number is None and ranks:
                number = self.draw.choice([*ranks])
            if number not in ranks:
                known = ", ".join(map(str, ranks)) or "none"
                raise CannotInject(f"found no rank {number} on {host}; its ranks: {known}")
            return f"rank {number}", RANK_FAULTS[kind](ranks[number])
        if kind in NETWORK_FAULTS:
            interface = self.attempt.network.interface
            return interface, NETWORK_FAULTS[kind](pid, interface)
        if kind == "shift clock":
            if self.attempt.fixed_clocks:
                raise CannotInject(self.attempt.fixed_clocks)
            file = self.attempt.layout_of(host).clock
            return f"{SHIFT_SECONDS} s ahead", faults.shift_clock(file)
        folder = self.attempt.layout_of(host).checkpoints
        if folder is None:
            raise CannotInject("the job has no CheckpointConfig")
        return "the checkpoint folder", faults.fill_disk(pid, Path(folder))

    def _damage_checkpoint(self, kind: str) -> str:
        """Damage the largest file of the newest checkpoint in S3; return the file's name."""
        config = self.attempt.request.get("CheckpointConfig")
        if not config:
            raise CannotInject("the job has no CheckpointConfig")
        s3 = self.attempt.job.place.clients("s3")
        bucket, prefix = checkpoint_sync.below(config["S3Uri"])
        try:
            found = [
                (step, size, key)
                for key, size in clients.objects(s3, bucket, prefix)
                if (step := checkpoint_sync.step_in(key.removeprefix(prefix))) is not None
            ]
            if not found:
                raise CannotInject("S3 has no checkpoint yet")
            # Beside the runtime's own checkpoints, other files are not what it continues from.
            own = [each for each in found if CHECKPOINT_NAME.fullmatch(each[2][len(prefix) :])]
            _, size, key = max(own or found)
            content = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
            damaged = (
                faults.halve(content)
                if kind == "halve checkpoint"
                else faults.flip_bit(content, self.draw.randrange(8 * max(1, size)))
            )
            s3.put_object(Bucket=bucket, Key=key, Body=damaged)
        except (ClientError, BotoCoreError) as error:
            raise CannotInject(f"S3: {clients.reason(error)}") from error
        return key.removeprefix(prefix)
