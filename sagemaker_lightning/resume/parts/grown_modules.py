"""What modules get from a checkpoint that they had got while they were trained.

The optimizers were made before. So they are made again of the modules as they are at the start.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from sagemaker_lightning.state.graph.kinds.objects import SPACES


class GrownModules:
    """Modules as they are before they get what they had got while they were trained.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.before = [
            (module, dict(vars(module)), [dict(space) for space in _spaces_of(module)])
            for module in modules
        ]

    @contextmanager
    def without_what_they_got(self) -> Iterator[None]:
        """Leave modules without what they have got, and with what this has replaced.

        What they get within is theirs as at the start.
        """
        spaces: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None, Any]] = []
        attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        for module, variables, members in self.before:
            for space, first in zip(_spaces_of(module), members, strict=True):
                present = dict(space)
                if has_got := any(
                    first.get(name, self) is not each for name, each in space.items()
                ):
                    space.clear()
                    space.update({name: first[name] for name in first if name in present})
                spaces.append((space, first, present if has_got else None, dict(space)))
            gone = {name: variables[name] for name in variables.keys() - vars(module).keys()}
            attributes.append((module, gone))
            vars(module).update(gone)
        try:
            yield
        finally:
            for space, first, replaced, within in spaces:
                made_within = {
                    name: value
                    for name, value in space.items()
                    if within.get(name, self) is not value
                }
                first.update(made_within)
                if replaced is not None:
                    after = replaced | made_within
                    # What is of the start comes before what they have got.
                    names = dict.fromkeys([*first, *after]) if made_within else after
                    space.clear()
                    space.update({name: after[name] for name in names if name in after})
            for module, gone in attributes:
                for name in gone:
                    vars(module).pop(name, None)


def _spaces_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of a module's own parameters, buffers and modules."""
    return [members_of(module) for members_of, _ in SPACES.values()]
