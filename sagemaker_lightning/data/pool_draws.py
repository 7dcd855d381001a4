"""Find out whether a pool of threads draws from the process's generators of random numbers.

Its threads draw in no fixed order, so that not even two runs that are left alone draw the same.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

from sagemaker_lightning.compat.random_generators import process_marks

METHODS: tuple[tuple[type, str], ...] = (
    (ThreadPoolExecutor, "submit"),  # `map` calls it, too
    *(
        (ThreadPool, f"{name}{how}")
        for name in ("apply", "map", "starmap")
        for how in ("", "_async")
    ),
    (ThreadPool, "imap"),
    (ThreadPool, "imap_unordered"),
)
"""By which a pool gets a function."""
SECONDS = 1.0
"""How long a caller waits for what it has given to a pool: meanwhile it draws nothing itself."""


class PoolDraws:
    """Finds out whether what one thread gives to pools draws there."""

    def __init__(self) -> None:
        self.found = False
        self.seconds = SECONDS

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look, within this context, at what this thread gives to pools."""
        thread = threading.get_ident()
        before = [(class_, name, vars(class_).get(name)) for class_, name in METHODS]
        for class_, name in METHODS:
            setattr(class_, name, self._watched(getattr(class_, name), thread))
        try:
            yield
        finally:
            for class_, name, method in before:
                if method is None:  # it is its base's
                    delattr(class_, name)
                else:
                    setattr(class_, name, method)

    def _watched(self, method: Callable[..., Any], thread: int) -> Callable[..., Any]:
        """Return a pool's method that looks at what the function draws that it is given."""

        @functools.wraps(method)
        def give(pool: Any, function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return method(pool, function, *rest, **options)
            given = method(pool, functools.partial(self._run, function), *rest, **options)
            if isinstance(given, Future) and wait([given], self.seconds).not_done:
                self.seconds = 0.0  # tasks that fetch ahead for an epoch would each take a second
            return given

        return give

    def _run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before = process_marks()
        try:
            return function(*arguments, **options)
        finally:
            self.found = self.found or process_marks() != before
