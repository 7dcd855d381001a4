"""parts/given_parts.py: what ExactResume(parts={...}) gets is saved, restored and compared."""

import copy
import io
import pickle
import random
import re
import sys
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from containers import ROOT
from short_fits import Noted, interrupted, trainer, weights
from torch import nn

from sagemaker_lightning import ExactResume, UserError
from sagemaker_lightning.resume.parts.given_parts import Parts
from sagemaker_lightning.state.graph.values import decode

ALLOWED = "expected a dict of objects with state_dict() and load_state_dict()"


class World:
    """A simulation that draws, and that nothing but its own methods restores.

    Args:
        loads: Whether it restores its state.
    """

    def __init__(self, loads: bool = True) -> None:
        self.random = random.Random(5)
        self.position = torch.zeros(2)
        self.calls: list[str] = []
        self.loads = loads

    def step(self) -> torch.Tensor:
        self.position += self.random.random()
        return self.position.clone()

    def state_dict(self):
        return {"random": self.random.getstate(), "position": self.position}

    def load_state_dict(self, state):
        self.calls.append("load")
        if self.loads:
            self.random.setstate(state["random"])
            self.position.copy_(state["position"])


class Player(Noted):
    """A model that plays in a world.

    Args:
        world: The world.
    """

    def __init__(self, world: World, **moments: str) -> None:
        super().__init__(**moments)
        self.world = world

    def on_train_start(self):
        super().on_train_start()
        self.world.position.fill_(7)  # what a hook resets is restored after it
        self.world.calls.append("start")

    def training_step(self, batch, batch_idx):
        self.world.calls.append("batch")
        return super().training_step([batch[0] + self.world.step()], batch_idx)


def play(folder, world: World, parts: dict | None = None, **options) -> Player:
    """Train in a world, which is a part unless others are given."""
    moments = {name: options.pop(name) for name in ("stop", "fails") if name in options}
    seeded = trainer(folder, parts={"world": world} if parts is None else parts, **options)
    model = Player(world, **moments)
    seeded.fit(model)
    return model


@pytest.mark.parametrize("stop", ["batch 0:1", "validation 0:1", "end 0"])
def test_a_part_is_as_it_was_after_an_interruption(tmp_path, capfd, stop):
    expected = play(tmp_path / "alone", World())
    with interrupted():
        play(tmp_path / "run", World(), stop=stop)
    model = play(tmp_path / "run", World())
    assert weights(model) == weights(expected)
    assert torch.equal(model.world.position, expected.world.position)
    assert (
        model.world.calls[:3] == ["start", "load", "batch"]
        and "warning" not in capfd.readouterr().out
    )
    assert model.world.calls.count("load") == 1


def test_a_part_is_not_restored_a_second_time_by_what_it_holds(tmp_path, capfd):
    """What only it holds is not reported: its own state is what its methods say."""

    class Counts(World):
        steps = 0

        def step(self):
            self.steps += 1
            self.rows = [io.TextIOWrapper(io.BytesIO())]
            return super().step()

    with interrupted():
        play(tmp_path, Counts(), stop="batch 1:2")
    model = play(tmp_path, Counts())
    assert model.world.steps == 1  # of 7
    assert "cannot be saved" not in capfd.readouterr().out


WORLD = World()


class Global(Player):
    def training_step(self, batch, batch_idx):
        WORLD.step()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("parts", [{"world": WORLD}, {}])
def test_a_part_in_a_variable_of_a_module_is_not_reported(tmp_path, capfd, parts):
    """It is not reported without being a part either: variables come back as attributes do."""
    trainer(tmp_path, parts=parts).fit(Global(World(), ends="end 0"))
    assert "WORLD" not in capfd.readouterr().out


def test_a_part_that_is_not_restored_as_saved_is_said(tmp_path, capfd):
    with interrupted():
        play(tmp_path, World(), stop="batch 1:1")
    play(tmp_path, World(loads=False))
    assert (
        "the state is not that of the interrupted run: on rank 0, part.world.random, "
        "part.world.position differ; likely because of a load_state_dict() that does not restore "
        "all of state_dict(); the run may end with other weights\n"
    ) in capfd.readouterr().out
    with interrupted():
        play(tmp_path / "strict", World(), stop="batch 1:1")
    with pytest.raises(UserError, match=r"--resume.strict: .* part.world.random"):
        play(tmp_path / "strict", World(loads=False), strict=True)


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (["world"], [], "the part 'world' is not given (ExactResume(parts=...)), and was"),
        ([], ["world"], "the part 'world' is given (ExactResume(parts=...)), and was not"),
        (
            ["a", "b"],
            ["b", "c"],
            "'a' is not given (ExactResume(parts=...)), and was; the part 'c'",
        ),
    ],
)
def test_a_checkpoint_of_other_parts_is_refused(tmp_path, before, now, says):
    world = World()
    with interrupted():
        play(tmp_path, world, parts=dict.fromkeys(before, world), stop="batch 1:1")
    with pytest.raises(UserError, match=f"is of another run: .*{re.escape(says)}"):
        play(tmp_path, world, parts=dict.fromkeys(now, world))


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_first_checkpoint(tmp_path):
    world = World()
    world.state_dict = lambda: {"screen": [io.TextIOWrapper(io.BytesIO())]}
    says = (
        r"^ExactResume\(parts=...\): state_dict\(\) of 'world' has a _io.TextIOWrapper at "
        r"\['screen'\]\[0\], which cannot be saved; keep numbers, text, tensors"
    )
    with pytest.raises(UserError, match=says):
        play(tmp_path, world, every_n_steps=2)
    assert world.calls.count("batch") == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "found 3, expected a dict of objects with"),
        ([World()], "found [<"),
        ({3: World()}, "found the name 3, expected a text"),
        ({"": World()}, "found the name '', expected a text"),
        (
            {"env": SimpleNamespace()},
            f"found 'env': a types.SimpleNamespace without state_dict(), {ALLOWED}",
        ),
        (
            {"env": SimpleNamespace(state_dict=dict)},
            f"found 'env': a types.SimpleNamespace without load_state_dict(), {ALLOWED}",
        ),
        ({"env": SimpleNamespace(state_dict={}, load_state_dict=len)}, "without state_dict()"),
        ({"env": World}, f"found 'env': the class World, {ALLOWED}"),
        ({"env": None}, "found 'env': a builtins.NoneType without state_dict()"),
    ],
)
def test_a_wrong_part_is_a_line_that_names_the_argument(tmp_path, given, says):
    with pytest.raises(UserError, match=rf"^ExactResume\(parts=...\): .*{re.escape(says)}"):
        ExactResume(tmp_path, parts=given)


@pytest.mark.parametrize("which", ["model", "layer", "callback", "data"])
def test_what_each_checkpoint_has_is_no_part(tmp_path, which):
    class Data(pl.LightningDataModule):
        """Data of the model's own."""

    model, callback, data = Noted(), pl.Callback(), Data()
    part = {"model": model, "layer": model.line, "callback": callback, "data": data}[which]
    says = rf"ExactResume\(parts=...\): found 'x': a .*{type(part).__name__} .*each checkpoint has"
    with pytest.raises(UserError, match=says):
        trainer(tmp_path, callback, parts={"x": part}).fit(model, datamodule=data)


def test_an_optimizer_and_a_module_of_ones_own_are_parts():
    teacher = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(teacher.parameters())
    teacher(torch.ones(1)).backward()
    optimizer.step()
    saved = Parts({"teacher": teacher, "optimizer": optimizer}).states()
    other = nn.Linear(1, 1)
    other_optimizer = torch.optim.Adam(other.parameters())
    Parts({"teacher": other, "optimizer": other_optimizer}).restore(saved)
    assert torch.equal(other.weight, teacher.weight)
    averages = other_optimizer.state[other.weight]["exp_avg"]
    assert torch.equal(averages, optimizer.state[teacher.weight]["exp_avg"])


def test_what_is_saved_is_a_copy():
    world = World()
    saved = Parts({"world": world}).states()
    world.step()
    assert decode(saved["world"])["position"].tolist() == [0, 0]


def test_a_copy_of_the_callback_has_the_parts_and_one_from_a_file_has_none(tmp_path):
    world = World()
    world.view = lambda: None  # nothing that pickle writes
    resume = ExactResume(tmp_path, parts={"world": world})
    assert copy.deepcopy(resume).parts.objects == {"world": world}
    assert pickle.loads(pickle.dumps(resume)).parts.objects == {}


# A package's own store ----------------------------------------------------------------------------


class Optimizers:
    """As pyro.optim: one optimizer a parameter, made when the parameter is seen first."""

    def __init__(self, arguments: dict) -> None:
        self.arguments = arguments
        self.of: dict = {}
        self.waiting: dict = {}

    def __call__(self, parameters) -> None:
        for parameter in parameters:
            if parameter not in self.of:
                self.of[parameter] = torch.optim.Adam([parameter], **self.arguments)
                name = next(each for each in STORE if STORE[each] is parameter)
                if name in self.waiting:
                    self.of[parameter].load_state_dict(self.waiting.pop(name))
            self.of[parameter].step()
            parameter.grad = None

    def get_state(self):
        return {name: self.of[STORE[name]].state_dict() for name in STORE if STORE[name] in self.of}

    def set_state(self, state):
        self.waiting.update(state)


STORE: dict[str, torch.Tensor] = {}


class Steps:
    """As pyro.infer.SVI: makes a step of the parameters that model and guide use."""

    def __init__(self, model, guide, optimizer, loss) -> None:
        self.model, self.guide, self.optimizer = model, guide, optimizer

    def step(self, batch) -> float:
        loss = self.model(self.guide(batch), batch)
        loss.backward()
        self.optimizer(STORE.values())
        return loss.item()


def parameter(name: str, value: torch.Tensor, **_) -> torch.Tensor:
    return STORE.setdefault(name, value.requires_grad_())


STAND_IN = SimpleNamespace(
    get_param_store=lambda: SimpleNamespace(named_parameters=STORE.items),
    optim=SimpleNamespace(Adam=Optimizers),
    infer=SimpleNamespace(SVI=Steps, Trace_ELBO=lambda: None),
)


class Infers(Noted):
    """A model whose steps are those of the page's class."""

    def __init__(self, inference, **moments: str) -> None:
        super().__init__(**moments)
        self.automatic_optimization = False
        self.inference = inference

    def training_step(self, batch, batch_idx):
        self.note(f"batch {self.current_epoch}:{batch_idx}")
        self.inference.svi.step(batch[0])


def draw_stand_in(batch):
    return parameter("loc", torch.zeros(2)) + parameter("scale", torch.ones(2)) * torch.randn(2)


def loss_of_stand_in(drawn, batch):
    return (batch - drawn).square().mean()


@pytest.mark.parametrize("package", ["stand-in", "pyro"])
def test_the_pages_class_for_pyro_resumes(tmp_path, monkeypatch, capfd, package):
    guide, model, pyro = draw_stand_in, loss_of_stand_in, STAND_IN
    if package == "pyro":
        pyro = pytest.importorskip("pyro")
        guide, model = functions_for(pyro)
    page = (ROOT / "docs/your-own-trainer.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = next(each for each in blocks if "SVI" in each)
    monkeypatch.setitem(sys.modules, "pyro", pyro)
    exec(code, variables := {"__name__": "inference"})

    def infer(folder, **moments: str) -> dict[str, list]:
        for name in list(pyro.get_param_store().keys()) if package == "pyro" else ():
            del pyro.get_param_store()[name]
        STORE.clear()
        torch.manual_seed(1)
        inference = variables["Inference"](model, guide, torch.zeros(2, 2))
        trainer(folder, parts={"pyro": inference}).fit(Infers(inference, **moments))
        return {name: each.tolist() for name, each in inference.parameters().items()}

    expected = infer(tmp_path / "alone")
    with interrupted():
        infer(tmp_path / "run", stop="batch 1:1")
    found = infer(tmp_path / "run")
    assert found == expected and found["loc"] != [0, 0]
    out = capfd.readouterr().out
    assert "changes while training" not in out and "warning" not in out
    assert "the next batch is the expected one, bit for bit" in out


def functions_for(pyro):
    """Return a guide and a model of pyro's."""

    def guide(batch):
        loc = pyro.param("loc", torch.zeros(2))
        positive = torch.distributions.constraints.positive
        scale = pyro.param("scale", torch.ones(2), constraint=positive)
        pyro.sample("z", pyro.distributions.Normal(loc, scale).to_event(1))

    def model(batch):
        z = pyro.sample("z", pyro.distributions.Normal(torch.zeros(2), 10.0).to_event(1))
        with pyro.plate("data", len(batch)):
            pyro.sample("x", pyro.distributions.Normal(z, 1.0).to_event(1), obs=batch)

    return guide, model
