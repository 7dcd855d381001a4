"""state/graph/classes: the classes of which a record may have new objects."""

import sys

import networkx
import pytest
from graph_records import Thing, train
from torchvision.transforms import v2

from sagemaker_lightning.state.graph.classes import Classes
from sagemaker_lightning.state.graph.kinds.base import class_name


def test_views_of_a_graph_that_training_asks_for_come_back():
    """Their classes are another package's, and the module that has the graph's class has them."""

    def change(model):
        model.graph.add_edge(1, 2, weight=0.5)
        model.weight = sum(weight for *_, weight in model.graph.edges.data("weight"))
        assert dict(model.graph.out_degree) == {1: 1, 2: 0} and len(model.graph.adj) == 2

    trained, resumed = train(lambda: Thing(graph=networkx.DiGraph()), change)
    assert list(vars(resumed.graph)) == list(vars(trained.graph))
    resumed.graph.add_edge(2, 3)
    assert dict(resumed.graph.out_degree) == {1: 1, 2: 1, 3: 0}
    assert [*resumed.graph.edges] == [(1, 2), (2, 3)]


def test_an_object_of_a_package_comes_back_if_the_program_has_one_of_it():
    """Each is of a module of its own."""
    trained, resumed = train(
        lambda: Thing(graph=networkx.DiGraph()),
        lambda model: setattr(model, "sets", networkx.utils.UnionFind([1, 2])),
    )
    resumed.sets.union(1, 2)
    assert [*resumed.sets.to_sets()] == [{1, 2}] and len([*trained.sets.to_sets()]) == 2


def test_a_librarys_module_that_a_program_did_not_have_at_its_start_comes_back():
    """The program has the class through a module that it has imported."""
    trained, resumed = train(
        lambda: Thing(steps=[v2.RandomHorizontalFlip()]),
        lambda model: model.steps.append(v2.RandomCrop(12, padding=1)),
    )
    assert [*map(repr, resumed.steps)] == [*map(repr, trained.steps)]


def test_a_class_of_a_library_that_is_imported_later_is_not_there():
    """A resumed program that has just started could not find it."""
    name = class_name(v2.RandomCrop)
    assert Classes([], frozenset(sys.modules))[name] is v2.RandomCrop
    assert name not in Classes([], frozenset(sys.modules) - {v2.RandomCrop.__module__})


@pytest.mark.parametrize(
    "name",
    [
        "subprocess.Popen",
        "os._wrap_close",
        "tempfile._TemporaryFileCloser",  # it removes a file at its end
        "torch.jit._script.RecursiveScriptModule",
        "torch.utils.tensorboard.writer.SummaryWriter.close",
        "pytorch_lightning.trainer.trainer.Trainer",
        "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint",
        "fsspec.implementations.local.LocalFileOpener",
        "builtins.type",
        "",
    ],
)
def test_a_class_whose_objects_do_something_is_not_there(name):
    assert name not in Classes([], frozenset(sys.modules))
