"""How a resumed run continues the files or the run of one logger.

What was logged after the checkpoint will be logged again. So a file loses it (FileContinuation).
Nothing can be removed from a server, and what the server has is not sent again (RunContinuation).
"""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from pytorch_lightning.utilities import rank_zero_only

from sagemaker_lightning.compat import lightning_loggers
from sagemaker_lightning.contract.atomic_files import atomic_write
from sagemaker_lightning.contract.log import log


class Continuation:
    """The continuation of one logger, by what any logger has.

    It keeps nothing: what has to be known later is with the logger. This class itself serves
    loggers of unknown classes: they get the version of the interrupted run.

    Args:
        logger: The logger, of class `serves`.
    """

    serves: type = object
    """The class of the loggers that this one is for."""
    argument = "version"
    """The argument of that class that chooses the files or the run."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    @property
    def name(self) -> Any:
        """The name by which the interrupted run's logger is known; asking for it makes no run."""
        return self.logger.name

    @property
    def version(self) -> Any:
        """The version, or the id of a run; None if there is none yet. Asking makes no run."""
        return self.logger.version

    def take_version(self, version: int | str) -> None:
        """Give the logger a version if it has none: it would take the next free one, or a run."""
        lightning_loggers.set_version_if_none(self.logger, version)

    def prepare(self, folder: Path | None) -> None:
        """Put what continues files or a run into the logger, unless its class has its own.

        Args:
            folder: The folder of the checkpoints; None if this run saves none.
        """

    def begin_training(self) -> None:
        """Note that a training begins."""

    def end_training(self) -> None:
        """Note that no training runs any more; it may have been noted already."""

    def resume(self, version: Any, trains: bool) -> None:
        """Continue the files or the run of the interrupted run.

        Args:
            version: The interrupted run's version. A checkpoint has it, and may say anything.
            trains: Whether the training begins, and not another run of the trainer, such as a
                validation or a search.
        """
        if is_name(version):
            self.take_version(version)

    def save(self) -> None:
        """Write or send all that was logged."""
        self.logger.save()

    def state(self) -> dict[str, Any]:
        """Return what `cut_back` takes; all that was logged was saved before."""
        return {}

    def takes(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state, of a checkpoint, which is input, is one that `state` returns."""
        return True

    def cut_back(self, state: Mapping[str, Any], step: int, first: bool) -> None:
        """Remove what was logged after a checkpoint was taken, or do not send it again.

        Args:
            state: What `state` returned when the checkpoint was taken.
            step: The optimizer step of the checkpoint.
            first: Whether this is the first host, to which files on S3 and servers are left.
        """

    def begin_anew(self) -> None:
        """Begin a new file or run if it was not known yet whether to continue one."""

    @rank_zero_only
    def _say_that_it_is_another(self, version: int | str | None) -> None:
        log.warning(
            f"{type(self.logger).__name__}: this run logs to {self.argument} {self.version}, the "
            f"interrupted run logged to {self.argument} {version}, so their values are not in one "
            f"curve; give the logger {self.argument}={version!r}, or use it only after fit has "
            "begun"
        )


class Trainings:
    """The trainings of this process that a logger has seen, and the pauses between them.

    A program may train several times, and log something in between, such as the results of a test.
    A training that continues from a checkpoint of an earlier one does not log that again: it stays.

    Args:
        pause: What describes the pause before the first training; the logger knows what it means.
    """

    def __init__(self, pause: Any) -> None:
        self.count = 0
        """Number of trainings that have begun."""
        self.pauses = [pause]
        """What describes each pause: 0 is before the first training, 1 after it, and so on."""

    @property
    def in_pause(self) -> bool:
        """Whether no training is running."""
        return len(self.pauses) > self.count

    def begin(self, pause: Any) -> Any:
        """Begin a training. Return what describes the pause before it.

        That is `pause` if nobody has said that the training before it ended.
        """
        self.end(pause)
        self.count += 1
        return self.pauses[-1]

    def end(self, pause: Any) -> None:
        """Begin a pause, if a training is running."""
        if not self.in_pause:
            self.pauses.append(pause)

    def pauses_since(self, number: int) -> list[Any]:
        """Return what describes each pause between training `number` and this one."""
        return self.pauses[number : self.count]


_trainings: "weakref.WeakKeyDictionary[Any, Trainings]" = weakref.WeakKeyDictionary()
"""The trainings of this process, by logger."""


class FileContinuation(Continuation):
    """The continuation of a logger that writes files."""

    @property
    def trainings(self) -> Trainings:
        """The trainings of this process that the logger has seen."""
        if self.logger not in _trainings:
            _trainings[self.logger] = Trainings(self.first_pause())
        return _trainings[self.logger]

    def first_pause(self) -> Any:
        """Return what describes the pause before the first training."""
        raise NotImplementedError

    def keep_files(self, trains: bool) -> None:
        """Keep the interrupted run's files, to which the logger writes.

        Args:
            trains: See `resume`.
        """

    def resume(self, version: Any, trains: bool) -> None:
        """Continue the files; a line says so if a training cannot."""
        super().resume(version, trains)
        if self.version == version:
            self.keep_files(trains)
        elif trains:
            self._say_that_it_is_another(version)

    def state(self) -> dict[str, Any]:
        """Return the number of the training, in this process."""
        return {"training": self.trainings.count}

    def takes(self, state: Mapping[str, Any]) -> bool:
        """Return whether the state has a number."""
        return is_count(state.get("training"))


class RunContinuation(Continuation):
    """The continuation of a logger that sends to a server; the first rank alone does."""

    def is_there(self, run_id: str) -> bool:
        """Return whether the server still has a run; if not, print so."""
        return True

    def keep_back(self, run_id: str, trains: bool) -> None:
        """Do not send what the interrupted run has sent.

        Args:
            run_id: The run, in which the logger continues.
            trains: See `resume`.
        """
        raise NotImplementedError

    @rank_zero_only
    def resume(self, version: Any, trains: bool) -> None:
        """Continue the run, if there is one; a line says so if a training logs to another."""
        if not is_name(version) or not self.is_there(version):
            return
        self.take_version(version)
        if self.version == version:
            self.keep_back(version, trains)
        elif trains:
            self._say_that_it_is_another(version)


def is_count(value: Any) -> bool:
    """Return whether a value of a checkpoint, which is input, is a number of things."""
    return type(value) is int and value >= 0


def are_counts(values: Any) -> bool:
    """Return whether a value of a checkpoint is a dict of numbers of things by name."""
    return isinstance(values, dict) and all(
        isinstance(name, str) and is_count(value) for name, value in values.items()
    )


def is_name(version: Any) -> bool:
    """Return whether a version of a checkpoint, which is input, names a folder or a file.

    A path would lead to files outside of the logger's folder, which would be overwritten.
    """
    return isinstance(version, int) or (
        isinstance(version, str)
        and version not in ("", "..")
        and version.isprintable()
        and Path(version).name == version
    )


def put_before_its_class(logger: Any, ours: type, **attributes: Any) -> None:
    """Make a class of ours the first base of a logger's class, which keeps its name.

    Args:
        logger: The logger.
        ours: The class.
        attributes: More attributes of the class that the logger gets.
    """
    own_class = type(logger)
    attributes["__module__"] = own_class.__module__
    # A parser that looks a class up by its name, jsonargparse's, passes local ones over.
    attributes["__qualname__"] = f"put_before_its_class.<locals>.{own_class.__qualname__}"
    logger.__class__ = type(own_class.__name__, (ours, own_class), attributes)


def replace_file(files: AbstractFileSystem, path: str, content: bytes) -> None:
    """Write a file so that it has all of `content`, or stays as it was."""
    if "file" not in files.protocol:
        files.pipe_file(path, content)  # an object is replaced as a whole
        return
    with atomic_write(Path(path)) as file:
        file.write(content)
