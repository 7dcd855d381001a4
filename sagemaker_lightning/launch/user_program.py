"""Which program a job runs, where it is, and the command line that launches it."""

import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sagemaker_training import environment, files, process

from sagemaker_lightning.contract import hyperparameters
from sagemaker_lightning.contract.environment import Environment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.launch import torchrun_command

HOME = (
    Path(__file__).resolve().parents[2]
)  # beside this package: where the image's own programs are
CODE = Path(environment.code_dir)  # where a job's own source is
DISTRIBUTIONS = {
    "sagemaker_torch_distributed_enabled": None,
    "sagemaker_pytorch_ddp_enabled": "pytorchddp",
    "sagemaker_distributed_dataparallel_enabled": "smdistributed.dataparallel",  # SDK 2's pytorchddp, too
}
TORCHRUN = "train_torchrun.py"
"""The image's program that starts the one beside it by torchrun."""
TRAINING = ("train.py", "train_multi_node.py", TORCHRUN)
"""Names of the image's programs of which the main host alone writes the model."""
REFUSED = {
    "sagemaker_mpi_enabled": "mpi",
    "sagemaker_parameter_server_enabled": "parameter_server",
    "sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla",
}


def sent(given: dict, name: str) -> str | None:
    """Return one of the toolkit's own hyperparameters, as text; None if it was not sent or is null."""
    value = hyperparameters.text(given.get(name))
    return None if value == "null" else value


def unpack(archive: str | None) -> None:
    """Put the job's source into CODE; the toolkit itself would leave it where it is if anything is there."""
    if not archive or Path(archive) == CODE:
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            local, source = archive, str(Path(folder, "source"))
            if archive.startswith("s3://"):
                local = str(Path(folder, "sourcedir.tar.gz"))
                files.s3_download(archive, local)
            if local.endswith(".gz"):
                _check_archive(local)
            files.download_and_extract(local, source)
            for path in Path(source).rglob("*"):  # a link that is there would be in the way
                if path.is_symlink() and (there := CODE / path.relative_to(source)).is_symlink():
                    there.unlink()
            shutil.copytree(source, CODE, symlinks=True, dirs_exist_ok=True)
    except Exception as error:
        raise UserError(
            f"sagemaker_submit_directory: found {archive}, which could not be unpacked ({error}); allowed is a .tar.gz "
            "that the job's role may read"
        ) from None


def _check_archive(path: str) -> None:
    """Raise ValueError for what the toolkit would take for the source itself, or could not unpack safely."""
    if not tarfile.is_tarfile(path):
        raise ValueError("it is damaged")
    if hasattr(tarfile, "data_filter"):
        return
    with tarfile.open(
        path
    ) as tar:  # Python below 3.11.4: of several links, one may lead out of the folder
        if links := [member.name for member in tar if member.issym() or member.islnk()]:
            raise ValueError(f"it has the link {links[0]}, which takes Python 3.11.4 or later")


def find(name: str | None) -> tuple[Path, str]:
    """Return the folder and name of the program: the job's own if it has it, else the image's."""
    if not name:
        raise UserError(
            "SAGEMAKER_PROGRAM: not given; allowed is a file of the job's source or of the image"
        )
    process.validate_entry_point(name)
    for folder in (CODE, HOME):
        if (folder / name).is_file():
            return folder, name
    if (CODE / "setup.py").is_file():
        return CODE, name
    found = ", ".join(sorted(path.name for path in CODE.iterdir())[:10]) if CODE.is_dir() else ""
    raise UserError(
        f"sagemaker_program: found {name}, which is neither in the job's source (which has: {found or 'nothing'}) nor "
        "in the image; allowed is the path of a file there, e.g. train.py"
    )


def written(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return the files below `folder`, each with what is another one once it is written anew."""
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    return {path: (status.st_ino, status.st_mtime_ns, status.st_size) for path, status in files}


def missing_model(folder: Path, name: str, here: Environment, before: Mapping[Path, tuple]) -> str:
    """Return what is wrong if a program that has ended well left no model; "" if it did, or if another host does.

    `before` is what was `written` to the model directory when the program started.
    """
    after = written(here.model_dir)
    trains = folder == HOME and Path(name).name in TRAINING
    expected = here.model_dir / "model.pt"
    changed = after.get(expected) != before.get(expected) if trains else after != before
    if changed or (here.current_host != here.hosts[0] and (trains or folder == CODE)):
        return ""
    return f"{name} ended with exit status 0 and wrote nothing to {here.model_dir}"


def _own_command(name: str, args: list[str]) -> list[str]:
    """Return the command line of the job's own program, as the toolkit's own launcher would run it."""
    if not name.endswith(".sh") and (CODE / "setup.py").is_file():
        return [sys.executable, "-m", name.removesuffix(".py"), *args]
    if name.endswith(".py"):
        return [sys.executable, "--", name, *args]
    return ["/bin/sh", "-c", shlex.join([f"./{name}", *args])]


def command(
    job, here: Environment, folder: Path, name: str, given: dict
) -> tuple[list[str], str, int]:
    """Return the command line, how it launches the program, in words, and how many processes of it."""
    ours = folder == HOME
    args = hyperparameters.flags(given) if ours else job.to_cmd_args()
    options = job.additional_framework_parameters
    if refused := [words for option, words in REFUSED.items() if options.get(option)]:
        raise UserError(
            f"distribution: found {refused[0]}, allowed are torch_distributed and none: the image has nothing else"
        )
    chosen = [option for option in DISTRIBUTIONS if options.get(option)]
    if not chosen or not here.takes_part:
        if ours:
            return [sys.executable, str(folder / name), *args], "one process", 1
        return _own_command(name, args), "the job's own, one process", 1
    if asked := DISTRIBUTIONS[chosen[-1]]:
        print(
            f"warning: distribution {asked} runs as torch_distributed (torchrun over NCCL, or gloo on CPUs): AWS has "
            "published no SMDDP build since PyTorch 2.5",
            flush=True,
        )
    if not name.endswith(".py"):
        raise UserError(f"sagemaker_program: found {name}, torchrun allows a .py file only")
    if ours:
        return [sys.executable, str((HOME / name).with_name(TORCHRUN)), *args], "torchrun", 1
    ranks = torchrun_command.processes(args, job.num_gpus)
    return torchrun_command.command(here, args, job.num_gpus, folder / name), "torchrun", ranks
