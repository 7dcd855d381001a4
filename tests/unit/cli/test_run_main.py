"""cli/run.py: what a run does before and after its training, without a training."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import Namespace
from pytorch_lightning import LightningDataModule, LightningModule

from sagemaker_lightning.callbacks.progress import StartProgress
from sagemaker_lightning.cli import run
from sagemaker_lightning.cli.application import Application
from sagemaker_lightning.process import lightning_import, start_notice


class Started:
    """A run whose training takes no time, with what it asked for.

    Each attribute that a test changes before the run counts for it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.global_step = 3
        self.rank = 0
        self.checkpoint_dir = self.resume_dir = str(folder / "checkpoints")
        self.log_dir: str | None = str(folder / "logs")
        self.resumes: list[dict] = []
        self.error: BaseException | None = None

    def command_line(self, environment, args, application, stop) -> SimpleNamespace:
        """Return the stand-in of a CommandLine."""
        self.environment, self.args, self.application, self.stop = (
            environment,
            args,
            application,
            stop,
        )
        self.trainer = SimpleNamespace(
            num_devices=2,
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
            callbacks=[],
            is_global_zero=self.rank == 0,
            logger=SimpleNamespace(save_dir=self.log_dir) if self.log_dir else None,
            global_step=self.global_step,
            fit=self.fit,
        )
        return SimpleNamespace(
            trainer=self.trainer,
            model="the model",
            given={},
            datamodule="the data",
            resume=SimpleNamespace(
                resumes=self.resumes, folder=SimpleNamespace(path=self.resume_dir)
            ),
            config=Namespace(
                trainer=Namespace(max_epochs=1),
                checkpoint=Namespace(dirpath=self.checkpoint_dir),
                resume=Namespace(dirpath=self.resume_dir),
                logger=Namespace(save_dir=self.log_dir),
            ),
            config_init=Namespace(checkpoint=SimpleNamespace(dirpath=self.checkpoint_dir)),
        )

    def fit(self, model, datamodule) -> None:
        self.asked.append(f"fit {model} on {datamodule}")
        if self.error:
            raise self.error


class Heartbeat:
    """Notes what it is given."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def failed(self, line: str) -> None:
        self.told.append(f"failed: {line}")

    def stopped(self, line: str) -> None:
        self.told.append(f"stopped: {line}")

    def done(self) -> None:
        self.told.append("done")


@pytest.fixture
def started(tmp_path: Path, monkeypatch) -> Started:
    """A run in an empty folder, outside of a job, without flags."""
    run_started = Started(tmp_path)
    asked = run_started.asked
    run_started.heartbeat = Heartbeat(asked)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(run, "CommandLine", run_started.command_line)
    monkeypatch.setattr(run.heartbeat, "Heartbeat", lambda path, name: run_started.heartbeat)
    monkeypatch.setattr(run, "export", lambda cli, environment: asked.append("export"))
    monkeypatch.setattr(
        run.threads, "divide_cpus", lambda *ranks: asked.append(f"divide CPUs {ranks}")
    )
    return run_started


def failed(capsys, *args: str) -> str:
    """Run, and return the line with which it fails."""
    with pytest.raises(SystemExit) as leaving:
        run.main(Application(), list(args))
    assert leaving.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_a_run_trains_exports_and_says_that_it_is_done(started, monkeypatch):
    monkeypatch.setattr(start_notice, "_activity", None)
    application = Application(settings=Path("x.yaml"))
    run.main(application, ["--a=1"])
    assert started.asked == [
        "divide CPUs (2, 'cpu')",
        "fit the model on the data",
        "export",
        "done",
    ]
    assert started.args == ["--a=1"] and started.application is application
    assert started.stop.home.folder == started.environment.checkpoint_dir
    heartbeat, progress = started.trainer.callbacks
    assert heartbeat is started.heartbeat and isinstance(progress, StartProgress)
    assert start_notice._activity == "reading flags and data"


def test_a_program_of_three_lines_has_these_defaults(monkeypatch):
    calls = []
    monkeypatch.setattr(run, "main", lambda *given: calls.append(given))
    run.SageMakerCLI(LightningModule, LightningDataModule, "own.yaml", ["--a=1"])
    run.SageMakerCLI()
    assert calls == [
        (Application(LightningModule, LightningDataModule, settings=Path("own.yaml")), ["--a=1"]),
        (Application(), None),
    ]


@pytest.mark.parametrize(
    ("argv", "args", "expected"),
    [
        (["--a=1"], None, ["--trainer.max_epochs=5"]),
        (["--a=1", "--b=2"], None, None),
        (["--a=1"], ["--mine=1"], ["--mine=1"]),
    ],
)
def test_the_command_line_of_a_job_is_its_hyperparameters(
    started, monkeypatch, tmp_path, argv, args, expected
):
    """The toolkit's own command line has lost some of them; a program's or a person's has not."""
    (tmp_path / "hyperparameters.json").write_text(json.dumps({"trainer.max_epochs": "5"}))
    monkeypatch.setenv("SM_INPUT_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("SM_USER_ARGS", '["--a=1"]')
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    run.main(Application(), args)
    assert started.args == expected


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("model_dir", "the model"),
        ("checkpoint_dir", "checkpoints"),
        ("resume_dir", "checkpoints"),
        ("log_dir", "logs"),
    ],
)
def test_a_folder_that_cannot_be_written_to_ends_the_run_before_its_training(
    started, monkeypatch, capsys, tmp_path, where, what
):
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file/folder")
    if where == "model_dir":
        monkeypatch.setenv("SM_MODEL_DIR", nowhere)
    else:
        setattr(started, where, nowhere)
    line = failed(capsys)
    assert line.startswith(f"error: {nowhere}: {what} cannot be written there (Not a directory)")
    assert not [text for text in started.asked if text.startswith("fit")]


def test_addresses_and_loggers_without_a_folder_are_not_checked(started, tmp_path):
    """They are not folders of this machine."""
    for log_dir in ("s3://bucket/logs", None):
        started.checkpoint_dir = started.resume_dir = "s3://bucket/checkpoints"
        started.log_dir = log_dir
        run.main(Application(), [])
    assert started.asked.count("export") == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["output", "model"]


@pytest.mark.parametrize(("in_job", "rank"), [(True, 0), (True, 1), (False, 0)])
def test_a_job_is_warned_of_folders_that_are_lost_once(
    started, monkeypatch, capsys, tmp_path, in_job, rank
):
    started.log_dir = "mine"
    started.rank = rank
    if in_job:
        monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path))
    run.main(Application(), [])
    assert ("warning: --logger.save_dir=mine" in capsys.readouterr().out) == (in_job and not rank)


def test_a_run_without_a_step_has_no_model(started, capsys):
    started.global_step = 0
    line = failed(capsys)
    assert line.startswith("error: --trainer: no step was trained; set max_epochs, max_steps and")
    assert started.asked[-1] == f"failed: {line}" and "export" not in started.asked


def test_a_run_that_fails_says_how_it_had_been_resumed(started, capsys):
    started.error = ValueError("no luck")
    started.resumes.append({"identical": False, "step": 4, "said": "the loss differs; more"})
    assert failed(capsys) == (
        "error: ValueError: no luck (resumed at step 4: the loss differs) [host localhost, "
        "local rank 0]"
    )


def test_fitting_stopped_is_said_once_in_the_log(started, monkeypatch):
    logger = run.logging.getLogger("pytorch_lightning.utilities.rank_zero")
    logger.removeFilter(run.say_once)
    monkeypatch.setattr(run.say_once, "lines_before", set())
    run.main(Application(), [])
    texts = ["`Trainer.fit` stopped: `max_epochs=1` reached."] * 2 + ["another line"] * 2
    records = [run.logging.LogRecord("x", 20, "", 0, text, None, None) for text in texts]
    assert [bool(logger.filter(record)) for record in records] == [True, False, True, True]


def test_an_interface_that_the_machine_lacks_is_forgotten(started, monkeypatch, capsys):
    for name in ("SM_NETWORK_INTERFACE_NAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "nowhere0")
    run.main(Application(), [])
    assert "NCCL_SOCKET_IFNAME" not in run.os.environ
    assert "warning: NCCL_SOCKET_IFNAME=nowhere0 is ignored" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "is_reported"), [([], True), ([True], True), ([False], False)])
def test_the_watchdog_hears_of_a_stop_that_is_reported_unless_another_process_does(
    started, monkeypatch, capsys, tmp_path, args, is_reported
):
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path))
    monkeypatch.setattr(started, "fit", lambda *_: started.stop.tell("interrupted", *args))
    run.main(Application(), [])
    line = "interrupted [host localhost, local rank 0]"
    assert f"stopped: {line}" in started.asked
    assert capsys.readouterr().err == (f"{line}\n" if is_reported else "")
    assert (tmp_path / "failure").exists() == is_reported


def test_another_version_of_lightning_is_refused_before_anything_of_it_is_imported(monkeypatch):
    def check_version() -> None:
        raise ImportError("found another one")

    monkeypatch.setattr(lightning_import, "check_version", check_version)
    monkeypatch.setattr(run, "check_version", run.check_version)  # puts it back
    with pytest.raises(ImportError, match="found another one"):
        importlib.reload(run)


def leave() -> None:
    exec("raise SystemExit")


def test_code_that_ended_the_program_is_named():
    """It is the last one that is in a file."""
    with pytest.raises(SystemExit) as leaving:
        leave()
    line = leave.__code__.co_firstlineno + 1
    assert run.left_early(leaving.value) == (
        f"test_run_main.py, line {line}, in leave: left by SystemExit with status 0 before the "
        "model was written; return instead, or raise an error"
    )
