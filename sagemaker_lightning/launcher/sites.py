"""Where jobs run, AWS or a rehearsal: its clients, and its commands as a user types them."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sagemaker_lightning.launcher import aws


@dataclass(frozen=True)
class Site:
    """Where jobs run.

    Attributes:
        name: The place in words, such as "us-east-1".
        client: Returns a boto3 client, given the service's name.
        program: The words of a shell that start its commands.
        flag: The flags of a command that name it, as "--region=us-east-1".
        patience: Seconds without an answer after which nobody waits for one any more.
    """

    name: str
    client: Callable[[str], Any]
    program: str
    flag: str
    patience: float = math.inf

    def command(self, name: str, job: str) -> str:
        """Return a command for a job, as a user types it."""
        return f"{self.program} {name} {job} {self.flag}"


def of_region(region: str, profile: str | None = None) -> Site:
    """Return AWS in a region, with the commands of the program that runs.

    Args:
        region: Its name.
        profile: The profile of the AWS configuration that the commands are to use, if one.
    """
    return Site(
        region,
        partial(aws.client, region_name=region),
        f"{sys.executable} {Path(sys.argv[0]).resolve()}",
        f"--region={region}" + (f" --profile={profile}" if profile else ""),
    )
