"""Checkpoint files and their folder: intact or absent, and the newest on all hosts."""

import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import warm
from containers import ROOT
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

import sagemaker_lightning
from sagemaker_lightning import ExactResume
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume import checkpoint_file
from sagemaker_lightning.resume.best_model import BestModel
from sagemaker_lightning.resume.checkpoint_dir import (
    BackgroundWriter,
    CheckpointDir,
    choose_checkpoint,
)
from sagemaker_lightning.resume.checkpoint_file import examine, read, write


def state(step: int) -> dict:
    return {
        "weights": torch.full((100,), float(step)),
        checkpoint_file.ENTRIES_KEY: {"loggers": [{"version": 3}]},
    }


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointDir:
    """A folder with the checkpoints of steps 10, 20 and 30."""
    directory = CheckpointDir(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30):
        directory.save(state(step), step, number=step * 7)
    return directory


def chosen(folder: CheckpointDir, hosts: int = 1) -> Path | None:
    return choose_checkpoint(
        CheckpointDir(folder.path, 3),
        "algo-1",
        lambda choice: [choice] * hosts,
        True,
        lambda path: "",
    )


def test_what_is_written_is_read(folder: CheckpointDir):
    path = chosen(folder)
    assert path == folder.path_of(30) == folder.path / "step-000000030.ckpt"
    assert torch.equal(read(path)["weights"], torch.full((100,), 30.0))
    assert examine(path) == (30, 210)
    # Somebody who knows only torch can read it.
    assert torch.equal(torch.load(path)["weights"], torch.full((100,), 30.0))
    os.mkfifo(folder.path_of(40))  # reading it would wait for ever
    torch.save({checkpoint_file.ENTRIES_KEY: {"loggers": []}}, folder.path_of(50))  # not ours
    assert CheckpointDir(folder.path, 3).logger_states() == [{"version": 3}]
    assert (folder.path / "last.ckpt").samefile(path)


def test_an_empty_folder_is_a_start(tmp_path: Path):
    assert chosen(CheckpointDir(tmp_path / "none", 3)) is None
    (tmp_path / "none").mkdir()
    (tmp_path / "none/notes.txt").write_text("someone else's")
    assert chosen(CheckpointDir(tmp_path / "none", 3)) is None


def test_only_so_many_are_kept_and_none_that_is_being_uploaded(folder: CheckpointDir):
    names = lambda: sorted(int(path.name[5:14]) for path in folder.path.glob("step-*.ckpt"))  # noqa: E731
    (folder.path / "step-000000010.ckpt.sagemaker-uploading").touch()
    (folder.path / "step-000000020.ckpt.sagemaker-uploading").touch()
    (folder.path / "step-000000020.ckpt.sagemaker-uploaded").touch()
    folder.save(state(40), 40, 1)
    folder.save(state(50), 50, 1)
    assert names() == [10, 30, 40, 50]
    (folder.path / "step-000000010.ckpt.sagemaker-uploaded").touch()
    folder.save(state(60), 60, 1)
    assert names() == [40, 50, 60]
    # A mark that is older than this process belongs to a job that has ended.
    (folder.path / "step-000000040.ckpt.sagemaker-uploading").touch()
    folder.started = time.time() + 60
    folder.save(state(70), 70, 1)
    assert names() == [50, 60, 70]


def cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1) // 2])


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def zero(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    start = draw.randrange(len(content))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content)


def grow(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 99)))


def empty(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"")


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def rename(path: Path, draw: random.Random) -> None:
    path.rename(
        path.with_name(
            draw.choice(
                ["step-000000099.ckpt", "step-000000005.ckpt", "step-1.ckpt", "old.ckpt.bak"]
            )
        )
    )


def link(path: Path, draw: random.Random) -> None:
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    shutil.move(path, elsewhere)
    path.symlink_to(
        draw.choice([elsewhere, Path("/dev/zero"), Path("nowhere"), Path("/etc/passwd")])
    )


def become(path: Path, draw: random.Random) -> None:
    path.unlink()
    draw.choice([path.mkdir, lambda: os.mkfifo(path)])()


def take(path: Path, draw: random.Random) -> None:
    # ModelCheckpoint writes such a file, under this name.
    write(path, {"state_dict": {}}, int(path.stem.removeprefix("step-")))


def name(path: Path, draw: random.Random) -> None:
    path.with_name("strange\n\udcff.ckpt").write_bytes(b"x")


def mark(path: Path, draw: random.Random) -> None:
    path.with_name(path.name + draw.choice([".sagemaker-uploading", ".sagemaker-uploaded"])).touch()


def foreign(path: Path, draw: random.Random) -> None:
    name = draw.choice(
        ["theirs.ckpt", "step-000000040.ckpt", "step-000000070.ckpt", "last.ckpt.old", "README"]
    )
    torch.save({"state_dict": {}}, path.with_name(name))


def leftover(path: Path, draw: random.Random) -> None:
    path.with_name(f"step-000000040.ckpt.{draw.randrange(10**6)}.sagemaker-ignore").write_bytes(
        b"half"
    )


MUTATIONS = [
    cut,
    flip,
    zero,
    grow,
    empty,
    delete,
    rename,
    link,
    become,
    take,
    name,
    mark,
    foreign,
    leftover,
]


@pytest.mark.slow
def test_a_thousand_damaged_folders(folder: CheckpointDir, tmp_path: Path, capsys):
    """A chosen file is intact, and a damaged one is named.

    If no intact one is left, it is an error, and not a new start.
    """
    draw = random.Random(4)
    outcomes = {"whole": 0, "error": 0, "start": 0}
    for _ in range(1000):
        directory = CheckpointDir(tmp_path / "copy/checkpoints", 3)
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(folder.path, directory.path)
        if draw.random() < 0.7:
            (directory.path / "last.ckpt").unlink()
        for _ in range(draw.randint(1, 6)):
            files = sorted(
                path
                for path in directory.path.glob("step-*.ckpt")
                if path.is_file() and not path.is_symlink()
            )
            if files:
                draw.choice(MUTATIONS)(draw.choice(files), draw)
        intact = {path for _, path in directory.checkpoints() if not isinstance(examine(path), str)}
        damaged = [path for _, path in directory.checkpoints() if path not in intact]
        capsys.readouterr()
        try:
            path = chosen(directory)
        except UserError as error:
            outcomes["error"] += 1
            assert not intact and "--resume.dirpath" in str(error) and "start anew" in str(error)
            assert len(str(error)) < 1000 and "\n" not in str(error)
            continue
        if path is None:
            outcomes["start"] += 1
            assert not intact and not damaged and not directory.misnamed()
            continue
        outcomes["whole"] += 1
        newest = max(examine(path)[0] for path in intact)
        assert torch.equal(read(path)["weights"], torch.full((100,), float(newest)))
        output = capsys.readouterr().out
        for _, newer in directory.checkpoints()[
            : [path_kept for _, path_kept in directory.checkpoints()].index(path)
        ]:
            assert f"warning: checkpoint {newer}" in output
        assert not list(directory.path.glob("*.sagemaker-ignore"))
    assert outcomes["whole"] > 500 and outcomes["error"] > 20


@pytest.mark.parametrize(
    "version", [checkpoint_file.FORMAT_VERSION - 1, checkpoint_file.FORMAT_VERSION + 1, 12]
)
def test_a_checkpoint_of_another_format_is_refused(folder: CheckpointDir, version: int):
    """In one line, before anything of it is read.

    It is not skipped in favour of an older one of this format.
    """
    footer = checkpoint_file.FOOTER.size
    content = folder.path_of(30).read_bytes()
    mark = f"\0sagemaker-lightning {version}\0".encode()
    folder.path_of(30).unlink()  # it is last.ckpt, too
    folder.path_of(30).write_bytes(
        content[:-footer] + mark + content[-footer:][len(checkpoint_file.MARK) :]
    )
    assert checkpoint_file.other_format(folder.path_of(30)) == version
    assert checkpoint_file.other_format(folder.path_of(20)) is None
    with pytest.raises(UserError) as raised:
        chosen(folder)
    assert f"step-000000030.ckpt (on algo-1) has checkpoint format {version}, this version" in str(
        raised.value
    )
    assert "\n" not in str(raised.value) and "move the checkpoints away to start anew" in str(
        raised.value
    )


def strings(value) -> set[str]:
    """Return all texts in a checkpoint, keys included."""
    if isinstance(value, dict):
        return strings(list(value)) | strings(list(value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return set().union(*map(strings, value))
    return {value} if isinstance(value, str) else set()


@pytest.mark.slow
def test_a_checkpoint_names_no_class_of_ours(tmp_path: Path):
    """A class of ours can then be renamed, and old checkpoints stay readable."""
    run = warm.run(
        [
            "python",
            str(ROOT / "app/train_multi_node.py"),
            "--trainer.max_steps=2",
            "--trainer.limit_val_batches=1",
        ],
        tmp_path,
        os.environ | {"PYTHONPATH": str(ROOT), "SM_CHECKPOINT_DIR": str(tmp_path / "checkpoints")},
    )
    assert run.returncode == 0, run.stdout
    checkpoint = read(tmp_path / "checkpoints/last.ckpt")
    # These are the flags, which choose classes.
    run_settings = checkpoint[checkpoint_file.ENTRIES_KEY].pop("run")
    assert run_settings
    assert set(checkpoint["callbacks"]) >= {
        "sagemaker_lightning.rank_consistency",
        "sagemaker_lightning.best_model monitor=val_loss mode=min",
    }
    classes = {
        name
        for name in vars(sagemaker_lightning)["PUBLIC"]
        if name not in ("Environment", "Logger")
    }
    named = {text for text in strings(checkpoint) for name in classes if name in text}
    assert not named


def test_a_checkpoint_that_is_code_is_refused(folder: CheckpointDir, tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    write(folder.path_of(40), {"weights": Evil()}, 40, 1)
    with pytest.raises(Exception, match="Weights only load failed"):
        read(folder.path_of(40))
    assert not (tmp_path / "ran").exists()
    assert "PosixPath" in checkpoint_file.why_unreadable({"hyper_parameters": {"folder": tmp_path}})
    assert (
        checkpoint_file.why_unreadable(
            {"hyper_parameters": {"sizes": [1, (2.0, None)], "name": "x"}}
        )
        == ""
    )


def everywhere(folders: list[CheckpointDir]) -> list:
    """Return what `choose_checkpoint` returns or raises on each host, of two ranks each."""
    gathered: dict[int, list] = {}
    barrier = threading.Barrier(2 * len(folders))
    answers = [None] * (2 * len(folders))

    def rank(number: int) -> None:
        rounds = 0

        def gather(own):
            nonlocal rounds
            rounds += 1
            gathered.setdefault(rounds, [None] * len(answers))[number] = own
            barrier.wait(20)
            return gathered[rounds]

        directory = folders[number // 2]
        try:
            answers[number] = choose_checkpoint(
                directory, f"algo-{number // 2 + 1}", gather, number % 2 == 0, lambda path: ""
            )
        except UserError as error:
            answers[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def copies(folder: CheckpointDir, tmp_path: Path, hosts: int) -> list[CheckpointDir]:
    directories = [CheckpointDir(tmp_path / f"host-{host}", 3) for host in range(hosts)]
    for directory in directories:
        shutil.copytree(folder.path, directory.path)
        (directory.path / "last.ckpt").unlink()
    return directories


def test_hosts_go_on_from_the_newest_that_all_have_alike(folder: CheckpointDir, tmp_path: Path):
    hosts = copies(folder, tmp_path, 3)
    assert everywhere(hosts) == [host.path_of(30) for host in hosts for _ in range(2)]
    hosts[1].path_of(30).unlink()
    assert everywhere(hosts) == [host.path_of(20) for host in hosts for _ in range(2)]
    empty(hosts[2].path_of(20), random.Random())
    assert everywhere(hosts) == [host.path_of(10) for host in hosts for _ in range(2)]
    write(hosts[0].path_of(10), state(10), 10, number=8)  # of another run of the same steps
    for index, error in enumerate(everywhere(hosts)):
        assert error.startswith(
            f"--resume.dirpath={hosts[index // 2].path}: found checkpoints, but none that every "
            "host has intact"
        )
        assert (
            "algo-1 has step 30; algo-2 has step 20; algo-3 has step 30" in error
            and "start anew" in error
        )
    for host in hosts:
        shutil.rmtree(host.path)
    assert everywhere(hosts) == [None] * 6
    hosts[1].save(state(10), 10, 1)
    assert all(
        "algo-1 has none; algo-2 has step 10; algo-3 has none" in error
        for error in everywhere(hosts)
    )


KILLED_WRITER = """
import sys
from pathlib import Path
import torch
from sagemaker_lightning.resume.checkpoint_dir import CheckpointDir, choose_checkpoint
folder = CheckpointDir(Path(sys.argv[1]), 3)
choose_checkpoint(folder, "algo-1", lambda told: [told], True, lambda path: '')
weights = torch.rand(2_000_000)
print("writing", flush=True)
for step in range(int(sys.argv[2]), 10**9):
    folder.save({"weights": weights + step, "step": step}, step, 1)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_files_only(tmp_path: Path):
    draw = random.Random(2)
    step = 1
    for _ in range(4):
        command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path / "checkpoints"), str(step)]
        process = warm.start(command, tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
        assert process.stdout.readline() == "writing\n"
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.communicate()
        directory = CheckpointDir(tmp_path / "checkpoints", 3)
        assert all(not isinstance(examine(path), str) for _, path in directory.checkpoints())
        if path := chosen(directory):
            step = read(path)["step"] + 1
    assert step > 1 and len(directory.checkpoints()) <= 5


def test_a_disk_that_is_full_costs_no_training_while_there_is_an_older_one(
    folder: CheckpointDir, capsys
):
    """A limit on files' sizes makes this process's writing fail as a full disk does."""
    writer = BackgroundWriter(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        writer.write(state(40), 40, 1)
        writer.wait()
        writer.warn_of_problem("training goes on, but")
        assert "training goes on, but no checkpoint could be written" in (
            output := capsys.readouterr().out
        )
        assert "the newest intact one is step-000000030.ckpt" in output
        nothing = BackgroundWriter(CheckpointDir(folder.path.with_name("new"), 3))
        nothing.write(state(40), 40, 1)
        nothing.wait()
        with pytest.raises(UserError, match="no checkpoint could be written there.*; make room"):
            nothing.warn_of_problem("training goes on, but")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(folder.path.glob("*.sagemaker-ignore")) and not folder.path_of(40).exists()
    writer.write(state(50), 50, 1)
    writer.wait()
    capsys.readouterr()
    writer.warn_of_problem("the training is done, and")
    assert chosen(folder) == folder.path_of(50) and capsys.readouterr().out == ""


def test_whatever_a_writer_dies_of_is_said(folder: CheckpointDir, capsys):
    """The next checkpoint is written all the same."""
    writer = BackgroundWriter(folder)
    writer.write(state(40) | {"lock": threading.Lock()}, 40, 1)
    writer.wait()
    writer.warn_of_problem("training goes on, but")
    output = capsys.readouterr()
    assert (
        "no checkpoint could be written" in output.out
        and "(TypeError: cannot pickle '_thread.lock'" in output.out
    )
    assert "Traceback" in output.err
    nothing = BackgroundWriter(CheckpointDir(folder.path.with_name("new"), 3))
    nothing.write({"lock": threading.Lock()}, 40, 1)
    nothing.wait()
    with pytest.raises(TypeError):
        nothing.warn_of_problem("training goes on, but")
    writer.write(state(50), 50, 1)
    writer.wait()
    assert not writer.problem_text and chosen(folder) == folder.path_of(50)


class Improving(LightningModule):
    """Each epoch's model is the best so far."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.weight(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", -float(self.current_epoch))

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 1))

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("exact", "kept_while_training"), [(None, 1), (False, 1), (True, 3)])
def test_files_that_are_not_the_best_any_more(tmp_path: Path, exact, kept_while_training):
    """Only checkpoints to resume from need them."""
    seen = []

    class Count(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            seen.append(len(list((tmp_path / "best").glob("*.ckpt"))))

    best = BestModel(tmp_path / "best", monitor="val_loss")
    resume = [] if exact is None else [ExactResume(tmp_path / "run", exact=exact)]
    Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[best, Count(), *resume],
    ).fit(Improving())
    assert seen == [0, 1, min(2, kept_while_training), kept_while_training]
    assert [str(path) for path in (tmp_path / "best").iterdir()] == [best.best_model_path]


def test_a_checkpoint_names_no_file_to_remove_outside_of_its_folder(tmp_path: Path):
    """The state may be forged; files that are not the best any more are removed."""
    here = BestModel(tmp_path / "here", monitor="loss", save_top_k=3)
    there = BestModel(tmp_path / "there", monitor="loss", save_top_k=3)
    own_name = str(tmp_path / "there/best.ckpt")
    foreign_names = [
        str(tmp_path / "code.ckpt"),
        str(tmp_path / "there/../code.ckpt"),
        "s3://bucket/code.ckpt",
    ]
    for foreign_name in foreign_names:
        forged = there.state_dict() | {
            name: foreign_name
            for name in ("best_model_path", "kth_best_model_path", "last_model_path")
        }
        forged["best_k_models"] = {path: torch.tensor(1.0) for path in (own_name, foreign_name)}
        forged["retired"] = {foreign_name: 9, own_name: 9}
        here.load_state_dict(forged)
        moved_name = str(tmp_path / "here/best.ckpt")
        assert here.retired == {moved_name: 9} and [*here.best_k_models] == [moved_name]
        assert here.best_model_path == here.kth_best_model_path == here.last_model_path == ""
    on_s3 = BestModel("s3://bucket/run", monitor="loss")
    kept = {"retired": {"s3://bucket/run/best.ckpt": 0}}
    on_s3.load_state_dict(on_s3.state_dict() | kept)
    assert on_s3.retired == kept["retired"]


def test_a_best_model_is_read_only_if_it_is_whole(tmp_path: Path, capsys):
    """Otherwise the next best one is read, if there is one.

    A file that another program has written is read if torch can read it.
    """
    best = BestModel(tmp_path, monitor="loss", save_top_k=3)
    names = [str(tmp_path / f"best-{number}.ckpt") for number in range(3)]
    for number, name in enumerate(names):
        write(Path(name), state(number))
        best.best_k_models[name] = torch.tensor(float(number))
    best.best_model_path = names[0]
    assert best.choose_intact() == names[0] and capsys.readouterr().out == ""
    content = bytearray(Path(names[0]).read_bytes())
    content[300] ^= 1
    Path(names[0]).write_bytes(content)
    assert best.choose_intact() == names[1]
    damaged = f"warning: {names[0]}, the best model, is damaged: its checksum does not match"
    assert capsys.readouterr().out == f"{damaged}; {names[1]} is written in its place\n"
    Path(names[1]).write_bytes(Path(names[1]).read_bytes()[:-100])  # cut off
    torch.save(state(2), names[2])
    assert best.choose_intact() == names[2]
    Path(names[2]).unlink()
    assert best.choose_intact() == ""
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == (
        f"warning: {names[2]}, the best model, is missing; the last one is written in its place"
    )


def test_the_stamps_of_torch_say_nothing_of_a_flipped_bit(folder: CheckpointDir):
    """The reason for our checksum: torch loads most files with a flipped bit silently."""
    content = folder.path_of(30).read_bytes()
    silent = 0
    for position in range(0, len(content) - 100, 41):
        changed = bytearray(content)
        changed[position] ^= 1
        folder.path_of(30).write_bytes(changed)
        assert isinstance(examine(folder.path_of(30)), str)
        try:
            silent += bool(torch.load(folder.path_of(30), weights_only=True))
        except Exception:
            continue
    assert silent
