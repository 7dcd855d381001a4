"""resume/files/checkpoint_dir.py: a damaged folder gives an intact checkpoint, or none."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import (
    chosen,
    empty,
    flip,
    folder_of_three,  # noqa: F401  the fixture folder
    leftover,
    state,
)

from sagemaker_lightning.contract.checkpoint_home import CheckpointHome
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.resume.files import checkpoint_file
from sagemaker_lightning.resume.files.checkpoint_dir import CheckpointDir
from sagemaker_lightning.resume.files.checkpoint_file import examine, read, write


def cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1) // 2])


def zero(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    start = draw.randrange(len(content))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content)


def grow(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 99)))


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
        directory = CheckpointDir(CheckpointHome(tmp_path / "copy/checkpoints"), 3)
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(folder.path, directory.path)
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
            assert not intact and "--resume.dirpath" in str(error) and "start over" in str(error)
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


def test_folders_with_the_names_of_files_stay_and_cost_nothing(folder: CheckpointDir):
    """S3 may have objects below any name."""
    old, shard = "step-000000005.ckpt", "step-000000099-1-rank-0000-of-0002.shard"
    of_old = "step-000000010-1-rank-0000-of-0002.shard"
    for each in (old, shard, of_old):
        (folder.path / each / "object").mkdir(parents=True)
    assert chosen(folder) == folder.path_of(30)
    folder.note_intact(30)
    assert folder.intact_steps == [10, 20, 30]
    folder.save(state(40), 40, number=280)
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(
        [old, shard, of_old, *(folder.path_of(step).name for step in (20, 30, 40))]
    )


@pytest.mark.parametrize(
    "version", [checkpoint_file.FORMAT_VERSION - 1, checkpoint_file.FORMAT_VERSION + 1, 99]
)
def test_a_checkpoint_of_another_format_is_refused(folder: CheckpointDir, version: int):
    """Before anything of it is read.

    It is not skipped in favour of an older one of this format.
    """
    footer = checkpoint_file.FOOTER.size
    content = folder.path_of(30).read_bytes()
    mark = f"\0sagemaker-lightning {version}\0".encode()
    folder.path_of(30).write_bytes(
        content[:-footer] + mark + content[-footer:][len(checkpoint_file.MARK) :]
    )
    assert checkpoint_file.other_format(folder.path_of(30)) == version
    assert checkpoint_file.other_format(folder.path_of(20)) is None
    says = rf"step-000000030.ckpt \(on algo-1\) has checkpoint format {version}, "
    with pytest.raises(UserError, match=says):
        chosen(folder)
