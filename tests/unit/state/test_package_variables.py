"""state/package_variables.py: which tensors of installed packages count as trained."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import pytorch_lightning as pl
import short_fits
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning.state.package_variables import PackageVariables, trained_tensors

PACKAGE = '''
import torch
from torch import nn

class Store:
    """Keeps the parameters of all models by name."""

    default = None

    def __init__(self):
        self.params = {}
        self.names = {}

    def param(self, name, value):
        self.params.setdefault(name, value.requires_grad_())
        self.names[self.params[name]] = name

STORE = Store()
CACHE = {}
COUNT = 0
FUNCTIONS = [len]
'''


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[ModuleType]:
    """Install a package, as pip does, which this module imports."""
    folder = tmp_path / "site-packages"
    for name, text in (("mathkit", "from mathkit.store import STORE"), ("mathkit/store", PACKAGE)):
        path = folder / (f"{name}/__init__.py" if name == "mathkit" else f"{name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    # No function here names it.
    monkeypatch.setitem(globals(), "mathkit", importlib.import_module("mathkit"))
    yield importlib.import_module("mathkit.store")
    for name in ("mathkit", "mathkit.store"):
        del sys.modules[name]


def names(*objects) -> list[str]:
    """Return the names of the package's trained tensors; pytest has those of other tests."""
    found = [each.name for each in trained_tensors(objects)]
    return [name for name in found if name.startswith("mathkit")]


def parameter(value: float = 0.0) -> torch.Tensor:
    return torch.full((2,), value, requires_grad=True)


def test_a_parameter_in_a_packages_dict_is_found_once(package):
    package.STORE.param("loc", torch.zeros(2))
    assert names() == ["mathkit.STORE.params.loc"]
    (found,) = (each for each in trained_tensors(()) if each.variable.startswith("mathkit"))
    assert found.variable == "mathkit.STORE" and found.value is package.STORE


def test_parameters_of_modules_optimizers_classes_and_containers_are_found(package):
    package.NET = nn.Linear(1, 1, bias=False)
    package.OPTIMIZER = torch.optim.SGD([parameter()])
    package.Store.default = parameter()
    package.CACHE["list"] = [(parameter(),)]
    assert sorted(names()) == [
        "mathkit.store.CACHE.list.0.0",
        "mathkit.store.NET.weight",
        "mathkit.store.OPTIMIZER.0.params.0",
        "mathkit.store.Store.default",
    ]


def test_caches_counters_and_results_are_not_trained(package):
    package.CACHE["positions"] = torch.arange(3)
    package.CACHE["result"] = parameter() * 2
    package.CACHE["lazy"] = nn.parameter.UninitializedParameter()
    package.COUNT = 7
    assert names() == []


def test_a_package_that_nothing_of_the_user_imports_is_not_searched(package, monkeypatch):
    package.STORE.param("loc", torch.zeros(2))
    monkeypatch.delitem(globals(), "mathkit")
    assert names() == []
    assert names(package.STORE) == ["mathkit.STORE.params.loc"]  # an object of the training is


def test_a_function_that_imports_the_package_by_itself_counts(package, monkeypatch):
    package.STORE.param("loc", torch.zeros(2))
    monkeypatch.delitem(globals(), "mathkit")

    variables = {"__name__": __name__}
    exec("def step():\n    import mathkit", variables)
    monkeypatch.setitem(globals(), "step", variables["step"])
    assert names() == ["mathkit.STORE.params.loc"]


def test_a_librarys_own_variables_are_not_searched(monkeypatch):
    monkeypatch.setattr(torch, "SOMETHING_TRAINED", parameter(), raising=False)
    assert not [each for each in trained_tensors(()) if each.variable.startswith("torch")]


def test_a_variable_is_changed_once_its_tensor_is(package):
    variables = PackageVariables()
    package.STORE.param("loc", torch.zeros(2))
    variables.find((), ())
    variables.note(forget=True)
    variables.find((), ())
    assert variables.changed(()) == {}
    with torch.no_grad():
        package.STORE.params["loc"].add_(1)
    marks = variables.find((), ())
    assert variables.changed(()) == {"mathkit.STORE": package.STORE}
    assert marks["mathkit.STORE"].object_ is package.STORE


def test_a_variable_that_appears_later_counts_from_then_on(package):
    """The package made it for the first batch; whether it is trained shows later."""
    variables = PackageVariables()
    variables.find((), ())
    variables.note(forget=True)
    package.STORE.param("loc", torch.zeros(2))
    variables.find((), ())
    variables.note(forget=False)
    assert variables.changed(()) == {}
    package.STORE.params["loc"] = parameter(1.0)  # another tensor of the same name
    variables.find((), ())
    assert list(variables.changed(())) == ["mathkit.STORE"]
    variables.note(forget=False)  # which does not forget the first value
    assert list(variables.changed(())) == ["mathkit.STORE"]
    variables.note(forget=True)
    assert variables.changed(()) == {}


def test_what_the_model_has_and_what_is_saved_is_not_a_change(package):
    variables = PackageVariables()
    package.STORE.param("loc", torch.zeros(2))
    package.STORE.param("scale", torch.zeros(2))
    known = [nn.Parameter(package.STORE.params["loc"].detach())]  # which shares its memory
    known.append(nn.parameter.UninitializedParameter())
    variables.find((), known)
    variables.note(forget=True)
    with torch.no_grad():
        for each in package.STORE.params.values():
            each.add_(3)
    variables.find((), known)
    assert list(variables.changed([{"other": torch.zeros(2)}])) == ["mathkit.STORE"]
    assert variables.changed([{"scale": (torch.full((2,), 3.0),)}]) == {}


class Loads:
    """An object that stands for another one, which it loads when it is asked for anything."""

    def __getattribute__(self, name):
        raise ImportError("of what is not there")


class Lazy(dict):
    """A dict that makes its values when it is asked for them."""

    def items(self):
        raise ImportError("of what is not there")


def test_what_loads_something_when_it_is_asked_is_not_asked(package, monkeypatch):
    package.LAZY = Loads()
    package.CACHE["lazy"] = Lazy(weight=parameter())
    monkeypatch.setitem(globals(), "LAZY", package.LAZY)
    assert names() == ["mathkit.store.CACHE.lazy.weight"]


def test_a_parameter_that_is_only_a_key_is_found(package):
    package.STORE.names[parameter()] = "loc"
    assert names() == ["mathkit.STORE.names.key#0"]


def test_an_odd_object_among_the_imported_modules_is_no_harm(package, monkeypatch):
    package.STORE.param("loc", torch.zeros(2))
    monkeypatch.setitem(sys.modules, "mathkit.odd", SimpleNamespace(weight=parameter()))
    monkeypatch.setitem(sys.modules, "mathkit.none", None)
    assert names() == ["mathkit.STORE.params.loc"]


class Inference(pl.LightningModule):
    """A model whose parameters the package keeps, and which steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(8, 2)), 2)

    def training_step(self, batch, batch_idx):
        store = importlib.import_module("mathkit").STORE
        store.param("loc", torch.zeros(2))
        loc = store.params["loc"]
        (loss,) = torch.autograd.grad((batch[0] - loc).square().mean(), [loc])
        with torch.no_grad():
            loc -= 0.1 * loss

    def configure_optimizers(self):
        return None


def test_a_run_names_what_a_package_keeps_at_its_first_checkpoint(package, tmp_path, capsys):
    short_fits.trainer(tmp_path, max_epochs=3).fit(Inference())
    says = "mathkit.STORE changes while training, and no checkpoint has it: a resumed run starts"
    assert capsys.readouterr().out.count(says) == 1


def test_a_run_that_has_the_packages_variable_in_the_model_names_nothing(package, tmp_path, capsys):
    model = Inference()
    model.store = package.STORE
    package.STORE.param("loc", torch.zeros(2))
    short_fits.trainer(tmp_path).fit(model)
    assert "changes while training" not in capsys.readouterr().out


def test_a_model_whose_parameters_have_no_memory_yet(package):
    package.STORE.param("loc", torch.zeros(2))
    known = [nn.LazyLinear(1).weight, torch.eye(2).to_sparse()]
    variables = PackageVariables()
    assert {name for name in variables.find([], known) if name.startswith("mathkit")} == {
        "mathkit.STORE"
    }


def test_a_package_that_does_not_use_torch_is_not_searched(package, monkeypatch):
    package.STORE.param("loc", torch.zeros(2))
    for name in ("torch", "nn"):
        monkeypatch.delattr(package, name)
    assert names() == []
    monkeypatch.setattr(package, "Parameter", nn.Parameter, raising=False)
    assert names() == ["mathkit.STORE.params.loc"]
