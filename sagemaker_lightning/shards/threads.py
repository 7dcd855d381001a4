"""Calls in daemon threads: none of them holds the exit of its process, as an executor's would."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from sagemaker_lightning.contract.errors import UserError


class Overdue(Exception):
    """A call has made no progress for too long."""


class Attempt:
    """A call in a thread of its own, which is left alone once it makes no progress.

    A socket's time limit begins again with each byte: no such limit ends a connection on which a
    byte arrives now and then, nor one whose address is still looked up.

    Args:
        ask: The call. It gets this attempt, and does by `step` what nobody else may do after it.
    """

    def __init__(self, ask: Callable[["Attempt"], Any]) -> None:
        self.ask = ask
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.is_left = False
        self.value: Any = None
        self.error: BaseException | None = None

    def result(self, seconds: float) -> Any:
        """Return what the call returns, or raise what it raises.

        Raises Overdue if `seconds` pass without a step.
        """
        self.moved = time.monotonic()
        start(self._run, "attempt")
        while not self.ended.wait(max(0.0, self.moved + seconds - time.monotonic())):
            with self.lock:
                if self.moved + seconds <= time.monotonic():
                    self.is_left = True
                    raise Overdue
        error, self.error = self.error, None  # else each would keep the other
        if error:
            raise error
        return self.value

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what the block does as progress; it is not begun once nobody waits for it."""
        with self.lock:
            if self.is_left:
                raise Overdue
            yield
            self.moved = time.monotonic()

    def _run(self) -> None:
        try:
            self.value = self.ask(self)
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


def mapped(function: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
    """Return what a function returns for each item, called by several threads.

    After an error, no other item is begun; those that are begun are not waited for.

    Args:
        function: The function.
        items: The items.
        threads: Number of threads, at most.
    """
    rest = enumerate(items)
    answers: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def work() -> None:
        for number, item in rest:
            try:
                answers.put((number, function(item), None))
            except BaseException as error:
                for _ in rest:
                    pass
                answers.put((number, None, error))

    for _ in range(min(threads, len(items))):
        start(work, "shards")
    values = [None] * len(items)
    for _ in items:
        number, value, error = answers.get()
        if error:
            raise error
        values[number] = value
    return values


def start(function: Callable[[], None], name: str) -> None:
    """Call a function in a daemon thread; UserError if this process may have no more of them."""
    try:
        threading.Thread(target=function, name=name, daemon=True).start()
    except RuntimeError as error:
        raise UserError(
            f"S3: {error}; expected room for 64 threads in each process that reads shards; look at "
            "`ulimit -u` and `ulimit -v`, or use fewer data workers"
        ) from None
