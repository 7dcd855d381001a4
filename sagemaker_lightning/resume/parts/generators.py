"""Generators of random numbers that the user's objects keep."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from sagemaker_lightning.resume.parts.part import Moment, Part
from sagemaker_lightning.resume.parts.roots import SAMPLERS, TRAINING, user_objects
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.resume_point import ResumePoint
from sagemaker_lightning.state import generators
from sagemaker_lightning.state.graph.nodes import GENERATOR, scan
from sagemaker_lightning.state.object_graph import GENERATORS

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run


class Generators(Part):
    """The states of the generators of the model, the callbacks, the optimizers and others."""

    key = "generators"
    what = "generators of random numbers of your own"
    moments = (Moment.TRAINING, Moment.EPOCH)

    def save(self, point: ResumePoint | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the states, as a graph has them, by path."""
        return states_of(self._found())

    def restore(self, saved: Any, moment: Moment) -> None:
        """Restore the states; once samplers have drawn an epoch again, those of samplers."""
        found = self._found()
        if moment is Moment.EPOCH:
            if not self.run.resumes_within_epoch or not self.resumed.same_ranks:
                return
            samplers = {
                path: part
                for path, part in user_objects(self.trainer).items()
                if path.startswith(TRAINING) and path.endswith(SAMPLERS)
            }
            keys = scan(samplers, skip=(Dataset,)).keys()
            found = {path: each for path, each in found.items() if id(each) in keys}
        set_states(found, saved)

    def restore_all(self, saved: Any) -> None:
        """Restore what `save` returned, whenever that was."""
        set_states(self._found(), saved)

    def digest(self, saved: Any, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return each state."""
        return {f"generators {path}": value for path, value in saved.items()}

    def _found(self) -> dict[str, Any]:
        """Return the generators of all objects but the training loaders', which are seeded.

        Validation data in a stream are not: they draw on from one validation to the next.
        """
        return generators_of(self.run, lambda root: not root.startswith(TRAINING))


def generators_of(run: "Run", is_root: Callable[[str], bool]) -> dict[str, Any]:
    """Return the generators that are reached, but for the process's, which `seed_all` seeds.

    Args:
        run: The run.
        is_root: Returns whether to start from one of the user's objects, by its name.
    """
    found = run.part(UserObjects).graph.nodes_of(*GENERATORS, is_root=is_root)
    return {path: node.value for path, node in found if not generators.is_global(node.value)}


def states_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generators, as a graph has them, by path."""
    return {path: GENERATOR.content(generator) for path, generator in found.items()}


def set_states(found: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore the states of generators, as far as there are some of their paths."""
    for path, generator in found.items():
        if path in saved:
            GENERATOR.fill(generator, None, [], saved[path])
