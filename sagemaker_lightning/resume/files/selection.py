"""Decides which checkpoint a job resumes from: the newest that every host has intact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files.checkpoint_file import FORMAT_VERSION


class CheckpointId(NamedTuple):
    """Identifies a checkpoint: copies of one checkpoint have the same."""

    step: int
    """Its optimizer step."""
    number: int
    """The number of the save, which two runs of the same steps do not share."""


@dataclass(frozen=True)
class HostCheckpoints:
    """What one host knows of its folder of checkpoints.

    Args:
        host: Name of the host.
        saves: Its checkpoints, newest first. One that was read and found damaged is not among them.
        intact: Those of them that were read and found intact, with the paths of their files.
        incomplete: Those of them that lack a file that belongs to them, such as the best model.
        in_memory: Those of them that are copies in memory: without one, a run may start over.
        problems: What is wrong with other files on the disk, and with checkpoints there that were
            left out.
        other_formats: Name and format of each checkpoint that another version of this program
            wrote.
        folder: The path of the folder on this host.
    """

    host: str
    saves: tuple[CheckpointId, ...] = ()
    intact: Mapping[CheckpointId, str] = field(default_factory=dict)
    incomplete: frozenset[CheckpointId] = frozenset()
    in_memory: frozenset[CheckpointId] = frozenset()
    problems: tuple[str, ...] = ()
    other_formats: tuple[tuple[str, int], ...] = ()
    folder: str = ""


def newest_common(
    hosts: Sequence[HostCheckpoints], setting: str, is_restart: bool = False
) -> CheckpointId | None:
    """Return the newest checkpoint that every host has; None if no disk has any file of one.

    Return None, too, if a program was started again in its containers, and a host has none: it has
    died before its first one was written, which other hosts may have written.

    A checkpoint that is incomplete on a host is used only if all that the hosts have in common are:
    a copy of the folder, such as SageMaker's to S3, may have a checkpoint and not yet the file that
    belongs to it.

    Nobody reads all files: the result may be damaged. The caller has each host read it, and calls
    this again with what the hosts have learned, until all have found it intact.

    Args:
        hosts: What each host has, in the same order on all ranks.
        setting: The setting of the folder and its value, as messages have them.
        is_restart: Whether the program was started again in its containers.

    Raises:
        UserError: There are checkpoints, but none that every host has, or one of another format.
    """
    for host in hosts:
        for name, version in host.other_formats:
            raise UserError(
                f"{setting}: {name} (on {host.host}) has checkpoint format "
                f"{version}, this version of the program has format {FORMAT_VERSION}; continue "
                "with the version that wrote it, or move the checkpoints away to start over"
            )
    common = [save for save in hosts[0].saves if all(save in host.saves for host in hosts)]
    complete = [save for save in common if not any(save in host.incomplete for host in hosts)]
    if common:
        return (complete or common)[0]
    several = len(hosts) > 1
    problems = [
        f"{problem} on {host.host}" if several else problem
        for host in hosts
        for problem in host.problems
    ]
    on_disk = [[save for save in host.saves if save not in host.in_memory] for host in hosts]
    has_had_none = [
        not saves and not host.problems for saves, host in zip(on_disk, hosts, strict=True)
    ]
    if all(has_had_none) or (is_restart and any(has_had_none)):
        return None
    differ = len({host.folder for host in hosts}) > 1
    found = [
        f"{host.host} has {f'step {saves[0].step}' if saves else 'none'}"
        + (f" in {host.folder}" if differ else "")
        for host, saves in zip(hosts, on_disk, strict=True)
    ]
    raise UserError(
        f"{setting}: found checkpoints, but none that every host has intact "
        f"({'; '.join([*found, *problems[:3]])}); restore one from a copy, or move them away to "
        "start over"
    )
