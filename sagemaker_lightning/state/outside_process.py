"""State that a training keeps outside its process: files, and environment variables.

No checkpoint has it. A file counts if the user's code reads it while training, and it was written
before and is written again: then training depends on what training has written. A cache that is
written once does not.
Several files in a folder, each written once and read later, count as one that changes, unless a
dataset keeps its samples there. A file to which training appends counts, too: it keeps the rows of
steps that are done again. If it is read besides, training depends on them.
"""

import builtins
import fcntl
import functools
import inspect
import io
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.managers import BaseProxy
from pathlib import Path
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # it exports it without __all__

from sagemaker_lightning.state.object_graph import LIGHTNINGS, is_own_module, namespace

MAX_FILES = 1024  # files written while training that are remembered, at most
READS = re.compile(r"[^wax]*").fullmatch  # modes of `open`
FETCHES = "torch.utils.data._utils.fetch"
"""The module whose code asks a dataset for samples."""
OPENING = (
    *("numpy.", "torch.serialization.", "torchvision.io.", "pandas.", "safetensors.", "joblib."),
    *("PIL.", "pathlib.", "json.", "pickle.", "gzip.", "bz2.", "lzma.", "zipfile.", "contextlib."),
)
"""The names of modules and packages that open files for whoever calls them, each with a dot."""
APPENDS = re.compile(r".*a.*").fullmatch


OF_LIGHTNING = "PL_GLOBAL_SEED", "PL_SEED_WORKERS"
"""Variables that `seed_everything` sets, for processes and workers that are started later."""


class OutsideState:
    """What the user's code has changed outside of the process while training."""

    def __init__(self) -> None:
        self.changed_files: set[str] = set()
        """Files that were found changed when they were read again, by the name they were given."""
        self.appended_files: set[str] = set()
        """Files to which the user's code appends, by the name they were given."""
        self.first_files: dict[str, str] = {}
        """The first file of each folder that was written while training and then read."""
        self.folders: set[str] = set()
        """Folders of which a file is among `changed_files` for all that come later."""
        self.of_libraries: set[str] = set()
        """Files that libraries have written, such as Lightning's checkpoints, and datasets."""
        self.contents: dict[str, tuple[int, int, int]] = {}
        """What tells the contents of files apart that were written while training."""
        self.read_files: set[str] = set()
        """Those of them that the user's code has read."""
        self.began = 0
        """When the training began, in nanoseconds as `time.time_ns` has it."""
        self.variables: dict[str, str | None] = {}
        """Environment variables; None for one that the user's code has set since the first."""

    def note_variables(self) -> None:
        """Compare those environment variables with their present values that are not noted yet.

        Libraries set theirs when they are first used. They count once they change.
        """
        self.variables = {**os.environ, **self.variables}

    def changed_variables(self) -> list[str]:
        """Return the names of the variables that have other values than when they were noted."""
        return [
            name
            for name, value in self.variables.items()
            if os.environ.get(name) != value and name not in OF_LIGHTNING
        ]

    @contextmanager
    def watching_files(self) -> Iterator[None]:
        """Look, within this context, at the files that are opened for reading or appending.

        And at the environment variables that the user's code sets.
        """
        self.began = time.time_ns()
        process = os.getpid()
        opens = builtins.open

        @functools.wraps(opens)
        def watched_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            # A data worker could tell nobody.
            if isinstance(mode, str) and os.getpid() == process:
                with suppress(OSError, TypeError, ValueError):
                    if READS(mode):
                        self._note_read(file)
                    elif APPENDS(mode):
                        self._note_append(file)
                    else:
                        self._note_write(file)
            return opens(file, mode, *args, **options)

        puts = os.putenv

        @functools.wraps(puts)
        def watched_putenv(key: Any, value: Any) -> None:
            name = os.fsdecode(key)
            if self.variables and name not in self.variables and _is_called_by_user():
                self.variables[name] = None
            puts(key, value)

        replaced = _replace_open(watched_open, opens)
        os.putenv = watched_putenv  # which `os.environ` calls
        try:
            yield
        finally:
            if os.putenv is watched_putenv:
                os.putenv = puts
            if replaced:
                _replace_open(opens, watched_open)

    def _note_read(self, file: Any) -> None:
        """Note that a file is opened for reading.

        Raises:
            OSError: There is no such file.
            TypeError: It is not a path.
            ValueError: It is not a path.
        """
        path = os.fsdecode(os.fspath(file))
        status = Path(path).stat()
        if status.st_mtime_ns < self.began:
            return
        content = _version(status)
        known = self.contents.get(path)
        if known is None and len(self.contents) >= MAX_FILES:
            return
        self.contents[path] = content
        if known is None and path not in self.of_libraries and _is_opened_by_user():
            self.read_files.add(path)
            folder = os.path.dirname(path)  # noqa: PTH120  (the name as it was given)
            if self.first_files.setdefault(folder, path) != path and folder not in self.folders:
                self.folders.add(folder)
                self.changed_files.add(path)
        is_another = known not in (None, content) or path in self.appended_files
        if is_another and _is_called_by_user():
            self.changed_files.add(path)

    def note_files_written_since(self) -> None:
        """Note the files that the user's code has read and that were written again since."""
        for path in self.read_files - self.changed_files:
            with suppress(OSError):
                if _version(Path(path).stat()) != self.contents[path]:
                    self.changed_files.add(path)

    def _note_write(self, file: Any) -> None:
        """Note a file that a library, or a dataset for its samples, opens for writing.

        Raises:
            TypeError: It is not a path.
        """
        if len(self.of_libraries) < MAX_FILES and not _is_opened_by_user():
            self.of_libraries.add(os.fsdecode(os.fspath(file)))

    def is_written(self, folder: str) -> bool:
        """Return whether a file was written in a folder since the training began."""
        with suppress(OSError), os.scandir(folder) as files:
            some = itertools.islice(files, MAX_FILES)
            return any(file.stat().st_mtime_ns >= self.began for file in some)
        return False

    def note_open_file(self, file: Any) -> None:
        """Note a file that an object has, if it was opened for appending before the training."""
        name, mode = getattr(file, "name", None), getattr(file, "mode", None)
        if isinstance(name, str) and isinstance(mode, str) and APPENDS(mode):
            self.appended_files.add(name)

    def _note_append(self, file: Any) -> None:
        """Note that a file is opened for appending.

        Raises:
            TypeError: It is not a path.
        """
        path = os.fsdecode(os.fspath(file))
        is_new = path not in self.appended_files and len(self.appended_files) < MAX_FILES
        if is_new and _is_called_by_user():
            self.appended_files.add(path)


def _version(status: os.stat_result) -> tuple[int, int, int]:
    """Return what differs once a file is written again: time, size and number."""
    return status.st_mtime_ns, status.st_size, status.st_ino


def _replace_open(function: Callable[..., Any], expected: Callable[..., Any]) -> bool:
    """Replace the built-in `open` if it is the one that is expected; return whether it was."""
    if builtins.open is not expected:  # somebody has replaced it since
        return False
    builtins.open = io.open = function
    return True


def _is_called_by_user() -> bool:
    """Return whether code of the user's, and no hook of Lightning's own, has asked for this."""
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__:
            if f"{module}.".startswith(LIGHTNINGS):  # they lie between a program and its hooks
                return False
            if is_own_module(module):
                return True
        frame = frame.f_back
    return False


def _is_opened_by_user() -> bool:
    """Return whether code of the user's opens a file itself, and not to read or cache a sample."""
    frame = inspect.currentframe()
    is_users = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == FETCHES:
            return False
        if is_users is None and not f"{module}.".startswith((f"{__name__}.", *OPENING)):
            is_users = is_own_module(module)
        if is_users is False:
            return False
        frame = frame.f_back
    return bool(is_users)


def hears_a_process(value: Any) -> bool:
    """Return whether an object reads a pipe or a socket, or has such as a public attribute.

    Another process may be at its other end, and have state of its own. So has that of a Manager of
    `multiprocessing`, whose objects open a socket when they are used, and a store of the ranks.
    """
    if isinstance(value, (BaseProxy, Store)):
        return True
    members = [each for name, each in namespace(value).items() if not name.startswith("_")]
    return any(_reads_a_pipe(each) for each in (value, *members))


def _reads_a_pipe(value: Any) -> bool:
    if not hasattr(type(value), "fileno"):
        return False
    readable = getattr(value, "readable", True)
    try:
        number = value.fileno()
        mode = os.fstat(number).st_mode
        flags = fcntl.fcntl(number, fcntl.F_GETFL)
        is_read = readable() if callable(readable) else readable
    except (OSError, ValueError, TypeError, AttributeError):  # closed, or no file of the system's
        return False
    is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    return bool(is_read) and is_pipe and flags & os.O_ACCMODE != os.O_WRONLY
