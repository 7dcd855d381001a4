"""How a training ends: with a model or a reason, and the files beside the model."""

import json
import pickle
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Job
from foreign import Data, Model

from sagemaker_lightning.cli import export
from sagemaker_lightning.contract.atomic_files import IGNORED_SUFFIX
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.launch import user_program

from app import train

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FLAGS = ["--model=diverging.Diverging", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
FLAGS += ["--trainer.enable_model_summary=false"]


@pytest.fixture
def fit(tmp_path: Path, monkeypatch, capfd):
    """Return a function that trains with flags, on a desk or in a job's folders.

    It returns the output and the exit status.
    """
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.syspath_prepend(str(SUPPORT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job/output").mkdir(parents=True)

    def fit(*flags: str, job: bool = True) -> tuple[str, int]:
        job_folders = {
            "SM_MODEL_DIR": "model",
            "SM_OUTPUT_DIR": "output",
            "SM_OUTPUT_DATA_DIR": "output/data",
        }
        for name, folder in job_folders.items() if job else ():
            monkeypatch.setenv(name, str(tmp_path / "job" / folder))
        status = 0
        try:
            train.main([*FLAGS, *flags])
        except SystemExit as leaving:
            status = leaving.code
        for name in job_folders:
            monkeypatch.delenv(name, raising=False)
        return "".join(capfd.readouterr()), status

    return fit


@pytest.mark.parametrize("job", [True, False])
def test_code_that_leaves_with_status_0_is_a_failure(fit, tmp_path: Path, job):
    output, status = fit("--model.how=exit", job=job)
    assert status == 1 and "Traceback" not in output
    error = (
        "error: diverging.py, line .* in _goes_wrong: left by SystemExit with status 0 before the "
        "model was written"
    )
    assert re.search(error, output)
    if job:
        assert (
            (tmp_path / "job/output/failure").read_text().startswith("error: diverging.py, line ")
        )


@pytest.mark.parametrize("flag", ["--print_config", "--help", "--model.help=ResNet18"])
def test_a_flag_that_only_prints_is_a_failure_in_a_job_and_none_on_a_desk(
    fit, tmp_path: Path, flag
):
    output, status = fit(flag)
    assert status == 1
    assert (
        (tmp_path / "job/output/failure")
        .read_text()
        .startswith("error: hyperparameters: found one that prints")
    )
    assert fit(flag, job=False)[1] == 0


# A line of code in a user's model, and the beginning of the line with which the job ends.
STEPS = {
    "images, labels = 1, 2, 3": "ValueError: too many values to unpack",
    "dict()['x']": "KeyError: 'x'",
    "self.log('loss', 1.0, on_step=False, on_epoch=False)": (
        "MisconfigurationException: `self.log(on_step=False"
    ),
}


@pytest.fixture(params=["app.mine", "mine"])
def somebodys(request, monkeypatch) -> Callable[[str, str], str]:
    """Return a function that makes a model with a line of code in one of its methods.

    The model is in a module of `app`, or of a job's source. The function returns its import path.
    """

    def make(method: str, line: str) -> str:
        file = ROOT / f"{request.param.replace('.', '/')}.py"
        source = (
            "import torch\nfrom diverging import Diverging\n"
            "from sagemaker_lightning import UserError\n\n\n"
        )
        source += f"class Mine(Diverging):\n    def {method}:\n        {line}\n"
        module = types.ModuleType(request.param)
        exec(compile(source, str(file), "exec"), vars(module))
        monkeypatch.setitem(sys.modules, request.param, module)
        return f"{request.param}.Mine"

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("line", "says"), STEPS.items(), ids=STEPS)
def test_a_fault_of_somebodys_code_has_its_traceback(fit, somebodys, tmp_path: Path, line, says):
    output, status = fit(f"--model={somebodys('training_step(self, *_)', line)}")
    failure = (tmp_path / "job/output/failure").read_text()
    first_line, *trace = failure.splitlines()
    assert (
        status == 1
        and first_line.startswith(f"error: {says}")
        and first_line in output.splitlines()
    )
    assert "mine.py" in output and "in training_step" in output
    assert says.partition(":")[0] in trace[-1]  # as much of it as there is room for


def test_an_error_of_torchs_in_the_model_keeps_its_traceback(fit, somebodys):
    """By torch, which is not asked to do what a flag says."""
    output, status = fit(f"--model={somebodys('__init__(self)', 'torch.nn.Linear(-1, 2)')}")
    assert status == 1 and "mine.py" in output and "in __init__" in output
    assert re.search(
        "^error: RuntimeError: Trying to create tensor with negative dimension",
        output,
        re.MULTILINE,
    )


@pytest.mark.parametrize("method", ["__init__(self)", "training_step(self, *_)"])
def test_a_mistake_that_somebodys_code_finds_is_one_line(fit, somebodys, tmp_path: Path, method):
    path = somebodys(method, "raise UserError('--a: found\\n1')")
    output, status = fit(f"--model={path}")
    assert status == 1 and "Traceback" not in output
    assert (
        tmp_path / "job/output/failure"
    ).read_text() == "error: --a: found 1 [host localhost, local rank 0]"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        (
            "--trainer.val_check_interval=9",
            "--trainer.val_check_interval: found 9, expected 1 to 8, the batches of",
        ),
        ("--checkpoint.monitor=nope", "`ModelCheckpoint(monitor='nope')` could not find"),
        (
            '--trainer.callbacks={"class_path": "EarlyStopping", "init_args": {"monitor": "nope"}}',
            "--trainer.callbacks: Early stopping conditioned on metric `nope` which is not avail",
        ),
        (
            f"--logger.name={'x' * 3000}",
            f"--logger.name: found '{'x' * 57}...', in which a name of 3000 characters is too long",
        ),
        (
            f"--logger.save_dir=a/{'x' * 3000}",
            f"{{}}/a/{'x' * 60}",
        ),
    ],
)
def test_what_lightning_finds_in_a_setting_when_it_trains_is_one_line(
    fit, tmp_path: Path, flag, says
):
    output, status = fit("--model.how=", flag)
    assert status == 1 and "Traceback" not in output
    failure = (tmp_path / "job/output/failure").read_text()
    assert failure.startswith(f"error: {says.format(Path.cwd())}") and len(failure) < 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hyperparameters", "says"),
    [
        (
            {"model": "diverging.Diverging", "model.how": "_exit"},
            "ended with exit status 0 within its training",
        ),
        (
            {"print_config": ""},
            "hyperparameters: found one that prints something and trains nothing",
        ),
    ],
)
def test_a_job_without_a_model_is_not_a_success(job: Job, hyperparameters, says):
    for name in ("diverging.py", "foreign.py"):
        job.write(f"code/{name}", (SUPPORT / name).read_text())
    job.write("input/config/hyperparameters.json", json.dumps(hyperparameters))
    job.write("model/model.pt", "an earlier model")
    run = job.run()
    assert run.returncode != 0, run.stdout
    assert (
        says in job.failure
        and job.failure.startswith("error: ")
        and not (job.base / "output/success").exists()
    )
    assert (job.base / "model/model.pt").read_text() == "an earlier model"


@pytest.mark.slow
def test_a_program_of_the_jobs_own_may_leave_no_model(job: Job):
    job.write("code/train.py", "print('done')")
    job.write("input/config/hyperparameters.json", '{"sagemaker_program": "train.py"}')
    run = job.run()
    assert run.returncode == 0 and (job.base / "output/success").exists()
    assert (
        f"warning: train.py ended with exit status 0 and wrote nothing to {job.base}/model"
        in run.stdout
    )


def test_the_main_host_alone_has_to_have_the_model(tmp_path: Path):
    hosts = {
        host: SageMakerEnvironment(hosts=("a", "b"), current_host=host, model_dir=tmp_path)
        for host in ("a", "b")
    }
    (tmp_path / "model.pt").write_text("before")
    written_before = user_program.written(tmp_path)
    own_program = (user_program.HOME, "app/train_torchrun.py")
    row_program = (user_program.HOME, "app/similarity.py")
    missing = {
        name: user_program.missing_model(*own_program, here, written_before)
        for name, here in hosts.items()
    }
    assert (
        "app/train_torchrun.py ended with exit status 0 and wrote nothing" in missing["a"]
        and not missing["b"]
    )
    assert all(
        user_program.missing_model(*row_program, here, written_before) for here in hosts.values()
    )
    jobs_program = (user_program.CODE_FOLDER, "train.py")
    missing = {
        name: user_program.missing_model(*jobs_program, here, written_before)
        for name, here in hosts.items()
    }
    assert missing == {
        "a": f"train.py ended with exit status 0 and wrote nothing to {tmp_path}",
        "b": "",
    }
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("a large sharded model's")
    assert not user_program.missing_model(*own_program, hosts["a"], written_before)
    index.unlink()
    (tmp_path / "notes.txt").write_text("no model")
    assert not user_program.missing_model(*jobs_program, hosts["a"], written_before)
    assert user_program.missing_model(
        *own_program, hosts["a"], written_before
    ) and not user_program.missing_model(*row_program, hosts["a"], written_before)
    (tmp_path / "aside").write_text("before")
    (tmp_path / "aside").rename(tmp_path / "model.pt")
    assert not user_program.missing_model(*own_program, hosts["a"], written_before)


class WithTest(Model):
    def test_step(self, batch, batch_idx):
        """Test nothing."""


class OwnTestData(WithTest):
    def test_dataloader(self):
        return Data().train_dataloader()


def finished(folder: Path, model: Model, data: Data | None = None, rank: int = 0):
    """Return the stand-in of a run that has ended, with its best model, and its environment."""
    environment = SageMakerEnvironment(
        model_dir=folder / "model",
        output_data_dir=folder / "out",
        checkpoint_dir=folder / "out/checkpoints",
    )
    environment.model_dir.mkdir()
    environment.checkpoint_dir.mkdir(parents=True)
    (folder / "elsewhere").mkdir()
    names = ["step-000000002.ckpt", "best.ckpt", "journal-0.bin", "wandb-1.jsonl"]
    step, best, *_ = paths = [environment.checkpoint_dir / name for name in names]
    elsewhere = folder / "elsewhere/best.ckpt"
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    for path in (*paths, elsewhere):
        torch.save({"state_dict": state}, path)
    events = []

    def test(*_, verbose: bool = True) -> list[dict[str, float]]:
        if verbose:
            print("Lightning's table of the results")
        return [{"test_loss": 0.25}] if rank == 0 else []

    trainer = SimpleNamespace(
        is_global_zero=rank == 0,
        local_rank=rank,
        callback_metrics={"val_loss": torch.tensor(0.5)},
        logger=None,
        strategy=SimpleNamespace(
            broadcast=lambda given: given,
            barrier=lambda name: events.append([path.exists() for path in paths]),
        ),
        test=test,
    )
    checkpoint = SimpleNamespace(
        choose_intact=lambda: str(best),
        files=lambda: [best, elsewhere, environment.checkpoint_dir / "gone.ckpt"],
    )
    run = SimpleNamespace(
        trainer=trainer,
        model=model,
        datamodule=data,
        config=None,
        config_init=SimpleNamespace(checkpoint=checkpoint),
        parser=SimpleNamespace(
            dump=lambda config, skip_none=True: "" if skip_none else "model: null\n"
        ),
        resume=SimpleNamespace(
            resumes=[], restarts=[], folder=SimpleNamespace(checkpoints=lambda: [(2, step)])
        ),
        events=events,
    )
    return run, environment


@pytest.mark.parametrize(
    ("model", "data", "is_tested"),
    [(Model, None, False), (WithTest, Data, False), (OwnTestData, None, True)],
)
def test_what_is_left_of_a_finished_run(tmp_path: Path, capsys, model, data, is_tested):
    run, environment = finished(tmp_path, model(), data and data())
    export.export(run, environment)
    assert run.events == [[True] * 4], "no rank returns before the model is written"
    assert not environment.checkpoint_dir.exists() and (tmp_path / "elsewhere/best.ckpt").exists()
    state = torch.load(environment.model_dir / "model.pt", weights_only=True)
    assert {float(tensor.mean()) for tensor in state.values()} == {1.0}, "those of the best model"
    described = json.loads((environment.model_dir / "model.json").read_text())
    assert described["best_model"] == "best.ckpt"
    assert described["metrics"] == {"val_loss": 0.5} | ({"test_loss": 0.25} if is_tested else {})
    assert (environment.model_dir / "config.yaml").read_text() == "model: null\n"
    assert capsys.readouterr().out.splitlines() == [
        "test_loss=0.25" if is_tested else "",
        f"model: {environment.model_dir}/model.pt",
        f"logs: {environment.log_dir.parent}",
        "checkpoints: removed, as the run is finished; with a checkpoint folder, they stay there",
    ]


def test_the_metrics_of_each_test_loader_are_kept(tmp_path: Path, capsys):
    run, environment = finished(tmp_path, OwnTestData())
    results = [{f"test_loss/dataloader_idx_{k}": k / 4} for k in range(2)]
    run.trainer.test = lambda *_, **__: results
    export.export(run, environment)
    described = json.loads((environment.model_dir / "model.json").read_text())
    assert described["metrics"] == {"val_loss": 0.5} | results[0] | results[1]
    line = "test_loss/dataloader_idx_0=0 test_loss/dataloader_idx_1=0.25"
    assert capsys.readouterr().out.splitlines()[0] == line


def test_another_rank_writes_and_removes_nothing(tmp_path: Path, capsys):
    run, environment = finished(tmp_path, OwnTestData(), rank=1)
    export.export(run, environment)
    assert run.events == [[True] * 4] and len(list(environment.checkpoint_dir.iterdir())) == 4
    assert not list(environment.model_dir.iterdir()) and capsys.readouterr().out == ""


def test_without_a_best_model_the_last_one_is_written(tmp_path: Path):
    model = Model()
    run, environment = finished(tmp_path, model)
    run.config_init.checkpoint.choose_intact = lambda: ""
    (environment.checkpoint_dir / "notes.txt").touch()
    export.export(run, environment)
    state = torch.load(environment.model_dir / "model.pt", weights_only=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert json.loads((environment.model_dir / "model.json").read_text())["best_model"] is None
    assert [path.name for path in environment.checkpoint_dir.iterdir()] == ["notes.txt"]


def test_a_checkpoint_of_the_best_model_makes_no_objects(tmp_path: Path):
    """Whoever can write to the folder could run code by them."""
    run, environment = finished(tmp_path, Model())
    torch.save({"state_dict": {}, "x": tmp_path}, environment.checkpoint_dir / "best.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        export.export(run, environment)


def test_a_compiled_model_gets_the_best_weights_of_one_that_is_not(tmp_path: Path):
    """torch.compile was switched on after the best model was saved."""
    model = Model()
    run, environment = finished(tmp_path, model)
    model.layers[0] = torch.compile(model.layers[0])
    export.export(run, environment)
    state = torch.load(environment.model_dir / "model.pt", weights_only=True)
    assert {float(tensor.mean()) for tensor in state.values()} == {1.0}


def test_a_model_that_loads_what_it_has_may_lack_the_rest(tmp_path: Path):
    model = Model()
    run, environment = finished(tmp_path, model)
    run.config_init.checkpoint.choose_intact = lambda: str(tmp_path / "some.ckpt")
    torch.save({"state_dict": {"layers.0.bias": torch.full((3,), 5.0)}}, tmp_path / "some.ckpt")
    with pytest.raises(RuntimeError, match="Missing key"):
        export.export(run, environment)
    model.strict_loading = False
    export.export(run, environment)
    state = torch.load(environment.model_dir / "model.pt", weights_only=True)
    assert state["layers.0.bias"].tolist() == [5.0] * 3


@pytest.mark.parametrize(
    ("output", "checkpoints", "stay"),
    [("out", "out/checkpoints", False), ("out", "out/other", True), ("out", "checkpoints", True)],
)
def test_only_checkpoints_in_the_jobs_output_are_removed(tmp_path, output, checkpoints, stay):
    (tmp_path / "run").mkdir()
    run, _ = finished(tmp_path / "run", Model())
    (tmp_path / checkpoints).mkdir(parents=True)
    file = tmp_path / checkpoints / "step-000000002.ckpt"
    run.resume.folder.checkpoints = lambda: [(2, file)]
    environment = SageMakerEnvironment(
        output_data_dir=tmp_path / output, checkpoint_dir=tmp_path / checkpoints
    )
    expected = [file, tmp_path / checkpoints / "gone.ckpt"]
    run.config_init.checkpoint.files = lambda: expected[1:]
    assert export.uploaded_checkpoints(run, environment) == ([] if stay else expected)


class Network(Model):
    """A model whose network may be a module or a name."""

    def __init__(self, network: object) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 3, "kind": Path("x")})
        self.network = network


@pytest.mark.parametrize(("network", "has_own"), [(torch.nn.Linear(1, 1), True), ("resnet", False)])
def test_the_description_of_a_model(tmp_path: Path, network, has_own):
    model = Network(network)
    data = SimpleNamespace(
        num_classes=2, classes=("a", "b"), dims=(1, 2), input_range=(0, 1), normalize=True
    )
    data.mean, data.std = (0.5,), (0.25,)
    for name in ("model.pt", "config.yaml", "model.json"):
        (tmp_path / f"{name}.killed{IGNORED_SUFFIX}").touch()
    export.save(tmp_path, model, data, {"x": float("nan")}, "r", "a: 1\n", resumes=[{"step": 3}])
    text = (tmp_path / "model.json").read_text()
    described = json.loads(text)
    assert text.startswith('{\n  "class_path"') and text.endswith("}\n")
    expected = {
        "class_path": "torch.nn.modules.linear.Linear" if has_own else f"{__name__}.Network",
        "module_class_path": f"{__name__}.Network",
        "hyperparameters": {"width": 3, "kind": "x"},
        "data_class_path": "types.SimpleNamespace",
        "num_classes": 2,
        "classes": ["a", "b"],
        "input_shape": [1, 2],
        "input_range": [0, 1],
        "normalization": {"mean": [0.5], "std": [0.25]},
        "metrics": {"x": None},
        "best_model": None,
        "revision": "r",
        "resumes": [{"step": 3}],
    }
    assert {name: described[name] for name in expected} == expected
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state.keys() == (network if has_own else model).state_dict().keys()
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    assert len(list(tmp_path.iterdir())) == 3
    for changed in (SimpleNamespace(normalize=True), SimpleNamespace(mean=(1,), std=(1,)), None):
        export.save(tmp_path, model, changed, {}, "r", "")
        described = json.loads((tmp_path / "model.json").read_text())
        names = ("num_classes", "classes", "input_shape", "input_range", "normalization")
        assert [described[name] for name in names] == [None] * 5
    assert described["data_class_path"] == f"{__name__}.Network"
