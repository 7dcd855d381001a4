"""state/graph/nodes: which of a library's objects are entered, as they are their attributes."""

import queue
import subprocess
import tempfile
import threading

import multidict
import numpy as np
import pytest
import pytorch_lightning as pl
import scipy.sparse
import scipy.stats
import torch
from graph_records import Thing, mine, through_a_file, train
from sklearn.cluster import MiniBatchKMeans
from sklearn.linear_model import SGDClassifier
from torchvision import tv_tensors

from sagemaker_lightning.state.graph.decoding import restore
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.nodes import LIBRARYS, kind_of
from sagemaker_lightning.state.graph.start import Start


def learns(object_):
    """Change an object of a library's in place."""
    if isinstance(object_, MiniBatchKMeans):
        object_.partial_fit(np.arange(12.0).reshape(6, 2))
    elif isinstance(object_, torch.quasirandom.SobolEngine):
        object_.draw(3)
    elif isinstance(object_, torch.distributions.Normal):
        object_.scale = object_.scale + 1
    elif scipy.sparse.issparse(object_) and object_.format == "lil":
        object_[0, 1] += 1
    else:
        object_.data += 1


def told(object_):
    """Return what an object of a library's says of itself."""
    if isinstance(object_, MiniBatchKMeans):
        return object_.predict(np.array([[0.0, 0.0]])), object_.cluster_centers_.tolist()
    if isinstance(object_, torch.quasirandom.SobolEngine):
        return object_.draw(2).tolist()
    if isinstance(object_, torch.distributions.Normal):
        return object_.mean, object_.stddev
    return object_.toarray().tolist()


def test_an_object_of_c_code_of_any_package_is_more_than_attributes():
    """It has none, and its code has what it holds."""
    owner, state = mine(index=multidict.MultiDict())
    owner.index.add("a", "1")
    state.encode()
    assert [each.name for each in state.unsaved] == ["index"]


@pytest.mark.parametrize("is_another", [False, True])
@pytest.mark.parametrize(
    "make_object",
    [
        lambda: MiniBatchKMeans(2, n_init=1, random_state=0),
        lambda: scipy.sparse.csr_matrix(np.eye(2)),
        lambda: scipy.sparse.lil_matrix(np.eye(2)),  # arrays of objects
        lambda: torch.distributions.Normal(torch.zeros(()), torch.ones(())),
        lambda: torch.quasirandom.SobolEngine(2),
    ],
)
def test_a_librarys_object_that_is_what_its_attributes_are_comes_back(make_object, is_another):
    """Its class leaves it to Python how it is copied; what it holds are values, too."""

    def change(model):
        if is_another:
            model.own = make_object()
        learns(model.own)
        model.alias = model.own

    trained, resumed = train(lambda: Thing(own=make_object()), change)
    assert resumed.alias is resumed.own
    assert str(told(resumed.own)) == str(told(trained.own))


@pytest.mark.parametrize(
    ("made", "is_new"),
    [
        (lambda: tv_tensors.Mask(torch.ones(2, 2)), True),
        (lambda: tv_tensors.Mask(torch.ones(2, 2)), False),
        (
            lambda: tv_tensors.BoundingBoxes([[1, 2, 3, 4]], format="XYWH", canvas_size=(9, 8)),
            True,
        ),
    ],
)
def test_a_tensor_of_a_librarys_class_comes_back_as_one(made, is_new):
    """Such as what torchvision's transforms give."""

    def change(model):
        if is_new:
            model.bank.append(made())
        model.bank[-1].add_(1)

    trained, resumed = train(lambda: Thing(bank=[] if is_new else [made()]), change)
    (one,), (other,) = trained.bank, resumed.bank
    assert type(other) is type(one) and torch.equal(other, one)
    assert vars(other) == vars(one)


def test_a_librarys_object_stays_what_it_was_when_it_grows():
    """Each scan asks again, also where nobody knows what it was at the start."""
    matrix = scipy.sparse.lil_matrix((80, 60), dtype=np.int32)
    kind = kind_of(matrix)
    for row in range(80):
        matrix[row, ::2] = row + 1
    assert matrix.nnz > 2_000 and kind_of(matrix) is kind is not LIBRARYS


def test_a_librarys_object_that_has_got_code_in_c_keeps_what_a_checkpoint_can_hold():
    """It was its attributes alone at the start; what it has got beside them is said."""

    def make():
        return Thing(own=SGDClassifier(random_state=0))

    trained = make()
    start = Start({"model": trained})
    trained.own.partial_fit(np.eye(2), [0, 1], classes=[0, 1])
    record, unsaved, *_ = encode({"model": trained}, start)
    assert {each.name for each in unsaved} == {"_loss_function_"}
    resumed = make()
    restore({"model": resumed}, Start({"model": resumed}), through_a_file(record))
    assert resumed.own.coef_.tolist() == trained.own.coef_.tolist() and resumed.own.t_ > 1


class Handled(torch.distributions.Distribution):
    """As a library's class that has a method of its own for copies."""

    __module__ = "torch.distributions"

    def __deepcopy__(self, memo):
        return self


def with_locks(object_):
    """Return an object that has got an array of locks."""
    object_.locks = np.array([threading.Lock()])
    return object_


@pytest.mark.parametrize(
    "make_object",
    [
        lambda: Handled(validate_args=False),
        lambda: scipy.stats.norm(0, 1),  # it holds one that is copied in a way of its own
        lambda: queue.Queue(),  # a lock
        lambda: with_locks(torch.distributions.Bernoulli(torch.ones(()))),
        lambda: torch.optim.lr_scheduler.LRScheduler.__new__(torch.optim.lr_scheduler.LRScheduler),
        lambda: subprocess.Popen.__new__(subprocess.Popen),
        lambda: pl.Trainer(logger=False, enable_checkpointing=False),
        lambda: tempfile.TemporaryDirectory.__new__(tempfile.TemporaryDirectory),
    ],
)
def test_a_librarys_object_that_is_more_than_its_attributes_is_not_entered(make_object):
    assert kind_of(make_object()) is LIBRARYS
