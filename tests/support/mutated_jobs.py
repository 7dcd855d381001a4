"""Makes jobs with random users' mistakes, and checks how each of them ends.

    python -m tests.support.mutated_jobs [--n 400] [--seed 1] [--only TEXT]  prints wrong ends
    python -m tests.support.mutated_jobs --numbers [--only TEXT]  each flag with numbers

A job must either run right, or end with one line that names what is wrong. Most jobs run as a job's
program would, in a process forked from a server that has imported everything: a second each.
"""

import argparse
import io
import json
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # for wrong_settings, and for the server below

from wrong_settings import (  # noqa: E402
    CLASS_CHOICES,
    CONFIGS,
    COSTLY_VALUES,
    FLAGS,
    NEEDED_SETTINGS,
    NUMBERS,
    OTHER_NUMERIC_FLAGS,
    WRONG_NAMES,
    WRONG_VALUES,
)

HANG_SECONDS = 240  # a job that takes longer hangs
BASE = {
    "trainer.max_epochs": "1",
    "trainer.max_steps": "2",
    "trainer.limit_train_batches": "2",
    "trainer.limit_val_batches": "2",
    "trainer.limit_test_batches": "2",
    "trainer.accelerator": "cpu",
    "trainer.num_sanity_val_steps": "0",
    "data.batch_size": "8",
    "model": "mine.Model",
}

USER_MODULE = '''
import sys
import torch
from pytorch_lightning import LightningDataModule, LightningModule

class Model(LightningModule):
    def __init__(self, width: int = 4, num_classes: int = 10):
        super().__init__()
        self.layer = torch.nn.LazyLinear(num_classes)
        self.layer(torch.zeros(1, 3 * 32 * 32))
    def forward(self, images):
        images = torch.nn.functional.interpolate(images, (32, 32))
        return self.layer(images.expand(-1, 3, -1, -1).flatten(1))
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Data(LightningDataModule):
    def __init__(self, size: int = 16, batch_size: int = 8):
        super().__init__()
        self.size, self.batch_size = size, batch_size
    def train_dataloader(self):
        samples = [(torch.rand(3, 32, 32), number % 10) for number in range(self.size)]
        return torch.utils.data.DataLoader(samples, self.batch_size)
    val_dataloader = test_dataloader = train_dataloader

class NoModel:
    """No model."""

class RaisesWhenMade(Model):
    def __init__(self):
        raise RuntimeError("my own bug")

class RaisesInTheStep(Model):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("my own bug")

class HasNoStep(LightningModule):
    """One that lacks everything."""

class LogsNothing(Model):
    def validation_step(self, batch, batch_idx):
        pass

class ReturnsNothing(Model):
    def training_step(self, batch, batch_idx):
        pass

class ReturnsText(Model):
    def training_step(self, batch, batch_idx):
        return "loss"

class Diverges(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * float("nan")

class LeavesInTheStep(Model):
    def training_step(self, batch, batch_idx):
        sys.exit(0)

class NoData(Data):
    def train_dataloader(self):
        return torch.utils.data.DataLoader([], 1)

class RaisingData(Data):
    def setup(self, stage):
        raise RuntimeError("my own bug")

class WrongData(Data):
    def train_dataloader(self):
        return torch.utils.data.DataLoader([(torch.rand(3, 32, 32), "a text")] * 8, 2)

def function():
    """Not a class."""
'''


@dataclass
class Case:
    """A job: its hyperparameters, the damage to its folder, and how it must end."""

    name: str
    hyperparameters: dict[str, object] = field(default_factory=dict)
    prepare: Callable[[Path], None] = lambda folder: None
    names: tuple[str, ...] = ()
    """What the line names, if the job fails: one of them."""
    fails: bool | None = None
    """Whether it must fail; None if it may."""
    own_bug: bool = False
    """Whether the cause is in the user's code: then a traceback is welcome."""


def numbers() -> Iterator[Case]:
    """Yield a job for each flag that takes a number and each of the NUMBERS."""
    names_seen = set()
    for chosen in CLASS_CHOICES:
        hyperparameters = {
            name: value for name, value in BASE.items() if not name.startswith("model")
        } | chosen
        for flag in _numeric(chosen, names_seen):
            names_seen.add((flag, chosen.get(flag.partition(".")[0])))
            for value in NUMBERS:
                yield Case(
                    f"{flag} = {_short(value)} ({' '.join(chosen.values())})",
                    hyperparameters | {flag: value},
                )
    for flag, chosen in OTHER_NUMERIC_FLAGS.items():
        for value in [*NUMBERS, "[0.5, -1]", "00:00:00:00"]:
            yield Case(f"{flag} = {_short(value)}", BASE | chosen | {flag: value})


def _numeric(chosen: dict[str, str], seen: set) -> Iterator[str]:
    """Yield the flags that the parser reads as a number, without those in `seen`."""
    from sagemaker_lightning.cli.lightning_cli import CommandLine
    from sagemaker_lightning.contract.environment import SageMakerEnvironment

    from app.train import APPLICATION

    class Parsed(CommandLine):
        """Reads flags and makes no objects."""

        def instantiate_classes(self) -> None:
            """Make nothing."""

    flags = [f"--{name}={value}" for name, value in chosen.items()]
    parsed = Parsed(SageMakerEnvironment(), flags, APPLICATION)
    for flag in (flag.removeprefix("--") for flag in parsed.given):
        with suppress(ValueError, KeyError):
            if (flag, chosen.get(flag.partition(".")[0])) not in seen:
                parsed.parse_arguments(parsed.parser, [*flags, f"--{flag}=2"])
                if type(parsed.given[f"--{flag}"]) in (int, float):
                    yield flag


def cases(seed: int) -> Iterator[Case]:
    """Yield random jobs without an end."""
    draw = random.Random(seed)
    kinds = (
        [_value] * 9
        + [_misspelt] * 4
        + [_old, _name, _name, _several, _twice, _config, _data, _data, _folder, _mine]
    )
    while True:
        yield draw.choice(kinds)(draw)


def _needed(flag: str) -> dict[str, str]:
    return {
        key: value
        for start, more in NEEDED_SETTINGS.items()
        if flag.startswith(start)
        for key, value in more.items()
    }


def _value(draw: random.Random) -> Case:
    flag = draw.choice(list(FLAGS))
    value = draw.choice(WRONG_VALUES)
    if (
        flag in ("trainer.devices", "data.num_workers", "trainer.num_nodes")
        and value in COSTLY_VALUES
    ):
        value = "abc"
    return Case(f"{flag} = {_short(value)}", BASE | _needed(flag) | {flag: value})


def _misspelt(draw: random.Random) -> Case:
    flag = draw.choice(list(FLAGS))
    at = draw.randrange(len(flag))
    wrong = draw.choice(
        [
            flag[:at] + flag[at + 1 :],
            flag[:at] + flag[at] + flag[at:],
            flag[:at] + draw.choice("abcxyz_-.") + flag[at:],
            flag[:at] + draw.choice("abcxyz") + flag[at + 1 :],
            flag.upper(),
            flag.replace("_", "-") + "-",
            f"{flag}s",
            flag.partition(".")[2] or f"x{flag}",
            f"trainer.{flag}",
        ]
    )
    known = wrong in FLAGS or not wrong.strip()
    return Case(
        f"misspelt {wrong}",
        BASE | {wrong: FLAGS[flag]},
        names=(f"--{wrong}", f"--{wrong.rpartition(chr(46))[0]}:"),
        fails=None if known else True,
    )


def _old(draw: random.Random) -> Case:
    from sagemaker_lightning.cli.suggestions import REPLACED

    name = draw.choice(list(REPLACED))
    flag = draw.choice(["trainer.", "", "data.", "model."]) + name
    return Case(
        f"old {flag}",
        BASE | {flag: draw.choice(["1", "x", "true"])},
        names=(f"--{flag}",),
        fails=True,
    )


def _name(draw: random.Random) -> Case:
    name = draw.choice(WRONG_NAMES)
    return Case(f"name {_short(name)}", BASE | {name: draw.choice(["1", "x", "", "{}", "true"])})


def _several(draw: random.Random) -> Case:
    wrong = {
        f"{draw.choice(['', 'trainer.', 'data.', 'zz.'])}zz{number}": "1"
        for number in range(draw.randint(2, 60))
    }
    wrong |= {
        flag: "zz"
        for flag in draw.sample(["data", "optimizer", "trainer.max_epochs", "seed_everything"], 2)
    }
    return Case(
        f"{len(wrong)} mistakes",
        BASE | wrong,
        names=tuple(f"--{name}" for name in wrong),
        fails=True,
    )


def _twice(draw: random.Random) -> Case:
    flag = draw.choice(["data.batch_size", "data.seed", "data.val_split"])
    name = flag.partition(".")[2]
    forms = {
        flag: "4",
        f"data.init_args.{name}": "5",
        "data": json.dumps({"class_path": "mine.Data", "init_args": {name: "6"}}),
    }
    chosen = dict(draw.sample(list(forms.items()), draw.randint(2, 3)))
    return Case(f"{name} given as {', '.join(chosen)}", BASE | chosen)


def _config(draw: random.Random) -> Case:
    damage = draw.choice([*CONFIGS, "missing", "a folder", "a recipe", "many"])
    if damage in CONFIGS:
        return Case(
            f"config {damage}",
            BASE | {"config": "my.yaml"},
            lambda folder: _write(folder / "code/my.yaml", CONFIGS[damage]),
        )
    value = {
        "missing": "my.yaml",
        "a folder": "/tmp",
        "a recipe": "cpuu",
        "many": "my.yaml,other.yaml",
    }[damage]
    return Case(f"config {damage}", BASE | {"config": value}, names=("--config",), fails=True)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _data(draw: random.Random) -> Case:
    """Damage the contents of a channel."""
    damage = draw.choice(
        [
            "right",
            "no file",
            "a file missing",
            "a file cut",
            "a bit turned",
            "an empty file",
            "a pickle of code",
            "labels wrong",
            "a shape wrong",
            "no pickle",
            "a folder for a file",
            "an empty channel",
            "an archive cut",
            "a file that is not an archive",
            "an archive without files",
            "no such channel",
            "a file for a channel",
        ]
    )
    case = Case(
        f"data: {damage}",
        BASE | {"data": "CIFAR10DataModule", "data.val_split": "20"},
        fails=damage != "right",
    )
    case.prepare = partial(_damage, damage, draw.random())
    case.names = ("batch", "cifar", "data")
    if damage == "a bit turned":  # of an image: nobody can know
        case.fails = None
    return case


def _damage(damage: str, chance: float, folder: Path) -> None:
    from conftest import batch, write_cifar

    channel = folder / "input/data/training"
    if damage in ("no such channel", "a file for a channel"):
        _write(channel, b"") if damage.startswith("a") else None
        return
    channel.mkdir(parents=True)
    if damage in ("no file", "an empty channel"):
        return
    batches = write_cifar(channel, images=20)
    path = sorted(batches.iterdir())[int(chance * 6) + 1]  # the first has the names of the classes
    content = path.read_bytes()
    wrong = batch(20, 1)
    if damage == "a file missing":
        path.unlink()
    elif damage == "a file cut":
        path.write_bytes(content[: int(len(content) * chance)])
    elif damage == "a bit turned":
        position = int(len(content) * chance)
        path.write_bytes(
            content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :]
        )
    elif damage == "an empty file":
        path.write_bytes(b"")
    elif damage == "a pickle of code":
        path.write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    elif damage == "labels wrong":
        path.write_bytes(pickle.dumps(wrong | {"labels": [11] * 20}))
    elif damage == "a shape wrong":
        path.write_bytes(pickle.dumps(wrong | {"data": wrong["data"][:, :100]}))
    elif damage == "no pickle":
        path.write_bytes(b"not a pickle")
    elif damage == "a folder for a file":
        path.unlink()
        path.mkdir()
    elif damage.startswith("an archive"):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            if "without" not in damage:
                archive.add(batches, batches.name)
        content = packed.getvalue()
        for file in batches.iterdir():
            file.unlink()
        batches.rmdir()
        content = {
            "an archive cut": content[: len(content) // 2],
            "a file that is not an archive": b"x",
        }.get(damage, content)
        (channel / "cifar-10-python.tar.gz").write_bytes(content)


def _folder(draw: random.Random) -> Case:
    """Put a file, or a link to nowhere, in the place of a folder that is written to."""
    name, flag = draw.choice(
        [
            ("model", None),
            ("output/data", None),
            ("checkpoints", None),
            ("code/here", "resume.dirpath"),
            ("code/here", "checkpoint.dirpath"),
            ("code/here", "logger.save_dir"),
            ("output", None),
        ]
    )
    link = draw.random() < 0.3

    def prepare(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        path.symlink_to("/proc/nonexistent/there") if link else _write(path, b"")

    hyperparameters = BASE | ({flag: "here"} if flag else {})
    return Case(
        f"{'a dead link' if link else 'a file'} at {name} {flag or ''}",
        hyperparameters,
        prepare,
        names=(name[-5:],),
    )


def _mine(draw: random.Random) -> Case:
    """Make the mistake in the user's own module."""
    chosen = draw.choice(
        [
            ("model", "mine.NoModel"),
            ("model", "mine.Nope"),
            ("model", "mine.function"),
            ("model", "mine.Data"),
            ("data", "mine.Model"),
            ("data", "mine.NoModel"),
            ("data", "mine.NoData"),
            ("data", "mine.RaisingData"),
            ("data", "mine.WrongData"),
            ("model", "mine.RaisesWhenMade"),
            ("model", "mine.RaisesInTheStep"),
            ("model", "mine.HasNoStep"),
            ("model", "mine.LogsNothing"),
            ("model", "mine.ReturnsNothing"),
            ("model", "mine.ReturnsText"),
            ("model", "mine.Diverges"),
            ("model", "mine.LeavesInTheStep"),
            ("model", "raises.Model"),
            ("model", "syntax.Model"),
            ("model", "lacks.Model"),
            ("model", "leaves.Model"),
            ("optimizer", "mine.Model"),
            ("trainer.callbacks", "mine.Model"),
            ("lr_scheduler", "mine.function"),
        ]
    )
    own = ("Raises", "Raising", "Wrong", "Returns", "Has", "NoData", "Leaves", "LogsNothing")
    case = Case(
        f"{chosen[0]}={chosen[1]}",
        BASE | dict([chosen]),
        names=(f"--{chosen[0]}", "my own bug", "mine.py", "loss"),
    )
    case.fails = (
        None if chosen[1] in ("mine.LogsNothing", "mine.ReturnsNothing", "mine.NoData") else True
    )
    case.own_bug = chosen[1].partition(".")[2].startswith(own)
    case.names = () if case.own_bug else case.names
    return case


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."


def job(folder: Path, case: Case) -> None:
    """Make the folder of a job, in the form of SageMaker's /opt/ml."""
    for name in ("code", "model", "output/data", "input/config", "input/data", "checkpoints"):
        (folder / name).mkdir(parents=True)
    _write(folder / "code/mine.py", USER_MODULE.encode())
    _write(folder / "code/raises.py", b"raise RuntimeError('my own bug')\n")
    _write(folder / "code/syntax.py", b"def f(:\n")
    _write(folder / "code/lacks.py", b"import nothing_of_this_name\n")
    _write(folder / "code/leaves.py", b"import sys\nsys.exit(0)\n")
    case.prepare(folder)


def run(folder: Path, hyperparameters: dict[str, object]) -> None:
    """Run the program in a process of its own, in the folder of the job's source.

    The toolkit does the same.
    """
    import torch

    from sagemaker_lightning.contract import hyperparameters as encoded
    from sagemaker_lightning.contract.environment import failure_file, host_and_rank
    from sagemaker_lightning.contract.failures import reported

    from app import train

    multiprocessing.set_start_method("fork", force=True)
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.chdir(folder / "code")
    sys.path.insert(0, str(folder / "code"))
    channels = sorted(path.name for path in (folder / "input/data").iterdir())
    os.environ.update(
        {
            "SM_HOSTS": '["algo-1"]',
            "SM_CURRENT_HOST": "algo-1",
            "SM_OUTPUT_DIR": str(folder / "output"),
            "SM_OUTPUT_DATA_DIR": str(folder / "output/data"),
            "SM_MODEL_DIR": str(folder / "model"),
            "SM_CHANNELS": json.dumps(channels),
            "SM_INPUT_CONFIG_DIR": str(folder / "input/config"),
            **{
                f"SM_CHANNEL_{name.upper()}": str(folder / "input/data" / name) for name in channels
            },
        }
    )
    with reported(failure_file(), host_and_rank()):
        args = encoded.flags(hyperparameters)
    train.main(args)


def faults(case: Case, folder: Path, status: int | None) -> list[str]:
    """Return what is wrong with the end of a job."""
    log = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
    failure = folder / "output/failure"
    reason = failure.read_text() if failure.is_file() else ""
    if status is None:
        return ["it hangs"]
    if status == 0:
        faults_found = ["it must fail"] if case.fails else []
        try:
            json.loads((folder / "model/model.json").read_text(), parse_constant=lambda name: 1 / 0)
        except (OSError, ValueError, ZeroDivisionError) as error:
            faults_found.append(f"a success without a model: {error}")
        return faults_found + (["a failure file of a success"] if reason else [])
    faults_found = ["it must not fail"] if case.fails is False else []
    lines = [line for line in log.splitlines() if line.strip()]
    first_line, *_ = reason.splitlines() or [""]
    if case.name.endswith("at output "):  # where the file would be
        first_line = next((line for line in lines if line.startswith("error: ")), "")
    if status < 0:
        faults_found.append(f"killed by signal {-status}")
    if not first_line.startswith(("error: ", "interrupted")):
        faults_found.append("no line in the failure file")
    if len(reason) > 1024 or len(first_line) > 1000:
        faults_found.append(f"too long: {len(first_line)} of {len(reason)}")
    if first_line not in log:
        faults_found.append("the line is not in the log")
    if "Traceback (most recent call last)" in log and not case.own_bug:
        faults_found.append("a traceback")
    if not first_line.isprintable():
        faults_found.append("unprintable")
    if case.names and not any(name.strip() in first_line for name in case.names):
        faults_found.append(f"none of {case.names[:3]} is named")
    # The last one: Lightning quotes in its messages what they are about.
    shown_names = ("--", "/", "hyperparameter", "`")
    if not case.names and not case.own_bug and not any(name in first_line for name in shown_names):
        faults_found.append("no flag, file or channel is named")
    return faults_found


def server():
    """Return the fork server of the jobs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["app.train", "mutated_jobs"])
    return context


def check(context, case: Case, folder: Path) -> list[str]:
    """Run a job and return what is wrong with its end."""
    job(folder, case)
    process = context.Process(target=run, args=(folder, case.hyperparameters))
    process.start()
    process.join(HANG_SECONDS)
    if process.exitcode is None:
        process.kill()
    return faults(case, folder, process.exitcode)


def main() -> None:
    """Run jobs, and print those that ended wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--numbers", action="store_true", help="not by chance: each flag with each number"
    )
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    arguments = parser.parse_args()
    context = server()
    wrong = 0
    jobs_run = 0
    names_seen = set()
    for case in numbers() if arguments.numbers else cases(arguments.seed):
        if case.name in names_seen or arguments.only not in case.name:
            continue
        names_seen.add(case.name)
        jobs_run += 1
        with tempfile.TemporaryDirectory() as folder:
            faults_found = check(context, case, Path(folder, "ml"))
            if faults_found:
                wrong += 1
                failure = Path(folder, "ml/output/failure")
                log = Path(folder, "ml/log")
                output = failure.read_text() if failure.is_file() else ""
                output = output or (log.read_text(errors="replace")[-600:] if log.exists() else "")
                print(
                    f"{case.name}: {'; '.join(faults_found)}\n    {ascii(output[:600])}", flush=True
                )
        if jobs_run >= arguments.n and not arguments.numbers:
            break
    print(
        f"{jobs_run} jobs{'' if arguments.numbers else f' of seed {arguments.seed}'}, "
        f"{wrong} not as they must be",
        flush=True,
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    import mutated_jobs  # the module that the server forks, and not __main__

    mutated_jobs.main()
