"""Reads what a job asks for, once, and prepares the program that it runs."""

import os
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from botocore.exceptions import ClientError
from sagemaker_training import environment, errors, files, process

from sagemaker_lightning.contract import hyperparameters, job_config, rendezvous
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.hyperparameters import MAX_RESTARTS
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.launch import HOME, requirements, torchrun_command
from sagemaker_lightning.process import threads

CODE_FOLDER = Path(environment.code_dir)
"""The folder of the job's own source."""
# The toolkit's hyperparameter for each distribution that torchrun can run, and the name by which
# a warning calls it; None if there is nothing to warn of.
DISTRIBUTIONS = {
    "sagemaker_torch_distributed_enabled": None,
    "sagemaker_pytorch_ddp_enabled": "pytorchddp",
    # SDK 2 sends it for pytorchddp, too.
    "sagemaker_distributed_dataparallel_enabled": "smdistributed.dataparallel",
}
TORCHRUN_PROGRAM = "train_torchrun.py"
"""The image's program that uses torchrun to start the program beside it."""
WEIGHTS = ("model.pt", "model.safetensors.index.json")
"""The files that have the weights, or that say where they are; a training writes one of them."""
TRAINING_PROGRAMS = ("train.py", "train_multi_node.py", TORCHRUN_PROGRAM)
"""Those of the image's programs that write the model on the main host only."""
REFUSED_DISTRIBUTIONS = {
    "sagemaker_mpi_enabled": "mpi",
    "sagemaker_parameter_server_enabled": "parameter_server",
    "sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla",
}


@dataclass(frozen=True)
class Request:
    """What a job asks this host to run, as its client has sent it."""

    program: str
    """The program's path in the job's source or in the image, or a module of the source."""
    named_by: str
    """The hyperparameter or variable that names it."""
    source: str | None
    """Path or s3:// address of the job's source; None or "" if it is in CODE_FOLDER already."""
    ranks: int | None
    """Processes that torchrun starts, unless a flag says another number; None without torchrun.

    0 stands for one.
    """
    flags: list[str]
    """The hyperparameters for a program of the image."""
    args: list[str]
    """The hyperparameters for a program of the job's own, as the toolkit writes them."""
    restarts_flag: str
    """The hyperparameter that sets how often the program is started again; "" if none does."""

    @classmethod
    def read(
        cls,
        job: environment.Environment,
        here: SageMakerEnvironment,
        all_hyperparameters: Mapping[str, object],
    ) -> "Request":
        """Read what a job asks for.

        Raises UserError if it names no program, for a distribution that the image does not have,
        and for a program that torchrun cannot run.

        Args:
            job: The toolkit's own Environment.
            here: Our view of the same variables.
            all_hyperparameters: The job's hyperparameters, those for the toolkit included.
        """
        program, named_by = program_of(all_hyperparameters)
        if not program:
            raise UserError(
                "SAGEMAKER_PROGRAM: not given; expected a file of the job's source or of the image"
            )
        ranks = _ranks_of_torchrun(job)
        if ranks is not None and not program.endswith(".py"):
            raise UserError(f"{named_by}: found {program}, torchrun allows a .py file only")
        return cls(
            program,
            named_by,
            _sent(all_hyperparameters, "sagemaker_submit_directory"),
            ranks if here.takes_part else None,
            hyperparameters.flags(all_hyperparameters),
            job.to_cmd_args(),
            next((name for name in MAX_RESTARTS if name in all_hyperparameters), ""),
        )


@dataclass(frozen=True)
class Program:
    """What this host runs."""

    folder: Path
    """CODE_FOLDER or HOME."""
    name: str
    command: list[str]
    launcher: str
    """In words."""
    cwd: Path
    variables: dict[str, str]
    files_before: dict[Path, tuple[int, int, int]]
    """The files of the model's folder before it runs."""

    @property
    def is_of_image(self) -> bool:
        """Whether the image has brought it."""
        return self.folder == HOME

    def missing_model(self, here: SageMakerEnvironment) -> str:
        """Return what is wrong if it ended well without a model; else ""."""
        return missing_model(self.folder, self.name, here, self.files_before)


def prepare(request: Request, here: SageMakerEnvironment) -> Program | None:
    """Prepare the job's source, and return its program; None if this host has none to run.

    Raises UserError if there is no such program, or its source or requirements cannot be had.

    Args:
        request: What the job asks for.
        here: Describes the job and this host.
    """
    unpack(request.source)
    folder, name = find(request.program, request.named_by), request.program
    is_own = folder == CODE_FOLDER
    if not (is_own or here.takes_part):
        log.info(
            f"{here.current_host} takes no part in the training, which is for "
            f"{', '.join(here.hosts)}"
        )
        return None
    if request.restarts_flag and is_own:
        log.info(
            f"hyperparameter {request.restarts_flag} sets how often {name} is started again in "
            "this container, and is not passed to it"
        )
    requirements.install(CODE_FOLDER, name, own=is_own)
    command_line, launcher, processes = command(request, here, folder)
    # The image's own programs set their threads themselves. For others we do, because torchrun
    # would leave each rank a single thread.
    thread_variables = threads.thread_variables(processes) if is_own else {}
    variables = rendezvous.variables(here) | torchrun_command.VARIABLES | thread_variables
    return Program(
        folder,
        name,
        command_line,
        launcher,
        cwd=CODE_FOLDER if CODE_FOLDER.is_dir() else HOME,
        variables=variables | os.environ,
        files_before=written(here.model_dir),
    )


def program_of(all_hyperparameters: Mapping[str, object]) -> tuple[str, str]:
    """Return the program that a job asks for, "" for none, and the name by which it does.

    Args:
        all_hyperparameters: The job's hyperparameters, those for the toolkit included.
    """
    if sent := _sent(all_hyperparameters, "sagemaker_program"):
        return sent, "sagemaker_program"
    return os.environ.get("SAGEMAKER_PROGRAM", ""), "SAGEMAKER_PROGRAM"


def _sent(all_hyperparameters: Mapping[str, object], name: str) -> str | None:
    """Return one of the toolkit's own hyperparameters as text.

    Return None if it is missing or null.
    """
    value = hyperparameters.text(all_hyperparameters.get(name))
    return None if value == "null" else value


def unpack(archive: str | None) -> None:
    """Put the job's source into CODE_FOLDER.

    The toolkit itself would not unpack the source if CODE_FOLDER had any files.

    Args:
        archive: Path or s3:// address of the source; nothing happens if it is None, "" or
            CODE_FOLDER.

    Raises UserError if the source cannot be unpacked.
    """
    if not archive or Path(archive) == CODE_FOLDER:
        return
    if CODE_FOLDER.exists() and not os.access(CODE_FOLDER, os.W_OK | os.X_OK):
        raise UserError(
            f"{CODE_FOLDER}: cannot be written, and the job's source is unpacked there; mount a "
            f"folder there that is writable for user {os.geteuid()}"
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            local = archive
            source = str(Path(folder, "source"))
            if archive.startswith("s3://"):
                local = str(Path(folder, "sourcedir.tar.gz"))
                _download(archive, local)
            if not Path(local).is_dir():
                _check_archive(local)
            files.download_and_extract(local, source)
            # copytree cannot write a link where there is one already.
            for path in Path(source).rglob("*"):
                if (
                    path.is_symlink()
                    and (old_link := CODE_FOLDER / path.relative_to(source)).is_symlink()
                ):
                    old_link.unlink()
            shutil.copytree(source, CODE_FOLDER, symlinks=True, dirs_exist_ok=True)
    except UserError:
        raise
    except Exception as error:
        why: object = error
        if isinstance(error, shutil.Error):  # a list of what copytree could not copy
            path, _, why = error.args[0][0]
            why = f"{path}: {why}"
        raise UserError(
            f"sagemaker_submit_directory: found {archive}, which could not be unpacked ({why}); "
            "expected a .tar.gz that the job's role may read, or a folder"
        ) from None


def _download(address: str, path: str) -> None:
    """Copy an archive from S3 to a local path.

    Raises UserError if S3 does not answer, as in a job that has no network; otherwise what the
    toolkit raises.
    """
    try:
        files.s3_download(address, path)
    except (ClientError, OSError):  # S3's own answer, and what the disk refuses
        raise
    except Exception as error:
        raise UserError(
            f"sagemaker_submit_directory: found {address}, and S3 was not reached ({error}); a job "
            "with network isolation fetches no source: give it as a channel, and its path there, "
            "such as /opt/ml/input/data/code/sourcedir.tar.gz"
        ) from None


def _check_archive(path: str) -> None:
    """Raise ValueError if a file is not an archive, is damaged or cannot be unpacked safely.

    The toolkit would take any other file for the source itself.
    """
    if not tarfile.is_tarfile(path):
        raise ValueError("it is damaged, or no archive")
    if hasattr(tarfile, "data_filter"):
        return
    # Before Python 3.11.4, nothing checks whether links, one after another, lead out of the folder.
    with tarfile.open(path) as tar:
        if links := [member.name for member in tar if member.issym() or member.islnk()]:
            raise ValueError(f"it has the link {links[0]}, which takes Python 3.11.4 or later")


def find(name: str, named_by: str) -> Path:
    """Return the folder of the program: CODE_FOLDER or HOME.

    A program of the job's own source comes before one of the image. If the source is a package
    (it has a setup.py), the name may also be that of a module in it.

    Raises UserError if there is no such program.

    Args:
        name: The program's.
        named_by: The hyperparameter or variable that names it.
    """
    try:
        process.validate_entry_point(name)
    except errors.ClientError as error:
        raise UserError(str(error)) from None
    for folder in (CODE_FOLDER, HOME):
        if (folder / name).is_file():
            return folder
    if _may_be_module(name):
        return CODE_FOLDER
    files_there = (
        ", ".join(sorted(path.name for path in CODE_FOLDER.iterdir())[:10])
        if CODE_FOLDER.is_dir()
        else ""
    )
    raise UserError(
        f"{named_by}: found {name}, which is neither in the job's source (which has: "
        f"{files_there or 'nothing'}) nor in the image; expected the path of a file there, e.g. "
        "train.py"
    )


def _may_be_module(name: str) -> bool:
    """Return whether this may be a module that the job's source installs."""
    is_package = (CODE_FOLDER / "setup.py").is_file()
    return is_package and "/" not in name and not name.endswith(".sh")


def written(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return the files below `folder`, each with numbers that tell its versions.

    They are the inode, the time of modification in ns, and the size in bytes.

    At least one of these numbers changes when a file is written again.
    """
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    return {path: (status.st_ino, status.st_mtime_ns, status.st_size) for path, status in files}


def missing_model(
    folder: Path,
    name: str,
    here: SageMakerEnvironment,
    files_before: Mapping[Path, tuple[int, int, int]],
) -> str:
    """Return what is wrong if a program ended well without a model; else "".

    Nothing is wrong, either, if another host writes the model.

    Args:
        folder: Folder of the program, HOME or CODE_FOLDER.
        name: Its name.
        here: Describes the job and this host.
        files_before: What `written` returned for the model directory before the program started.
    """
    files_after = written(here.model_dir)
    is_training_program = folder == HOME and Path(name).name in TRAINING_PROGRAMS
    is_changed = (
        any(
            files_after.get(path) != files_before.get(path)
            for path in (here.model_dir / name for name in WEIGHTS)
        )
        if is_training_program
        else files_after != files_before
    )
    if is_changed or (
        here.current_host != here.hosts[0] and (is_training_program or folder == CODE_FOLDER)
    ):
        return ""
    return f"{name} ended with exit status 0 and wrote nothing to {here.model_dir}"


def _own_command(name: str, args: list[str]) -> list[str]:
    """Return the command line of the job's own program.

    The toolkit's own launcher would run the same, except in a source with a setup.py: it takes
    every name for that of a module, also the path of a file (src/train.py).
    """
    if _may_be_module(name) and not (CODE_FOLDER / name).is_file():
        return [sys.executable, "-m", name.removesuffix(".py"), *args]
    if name.endswith(".py"):
        return [sys.executable, "--", name, *args]
    return ["/bin/sh", "-c", shlex.join([f"./{name}", *args])]


def _torchrun_of_tuner(drivers: Path) -> int | None:
    """Return the processes of a node that a tuner of SDK 3 asks for; None if it asks for none.

    0 stands for one for each GPU. A tuning job has no entry point of its own. So SDK 3's tuner
    (3.27, train/tuner.py) sends the program as SDK 2 does, and its ModelTrainer's `distributed` in
    the channel of its drivers alone.

    Args:
        drivers: The folder of that channel.

    Raises UserError if it asks for MPI.
    """
    file = drivers / "distributed.json"
    distributed = job_config.read(file) if file.is_file() else {}
    if "mpi_additional_options" in distributed:
        raise UserError(
            "distributed: found MPI, expected Torchrun() or none: the image has nothing else"
        )
    if "process_count_per_node" not in distributed:
        return None
    return int(distributed["process_count_per_node"] or 0)


def _ranks_of_torchrun(job: environment.Environment) -> int | None:
    """Return how many processes torchrun starts here; None if the job does not ask for torchrun.

    Raises UserError for a distribution that the image does not have.

    Args:
        job: The toolkit's own Environment.
    """
    options = job.additional_framework_parameters
    if refused := [words for option, words in REFUSED_DISTRIBUTIONS.items() if options.get(option)]:
        raise UserError(
            f"distribution: found {refused[0]}, expected torch_distributed or none: the image "
            "has nothing else"
        )
    enabled = [option for option in DISTRIBUTIONS if options.get(option)]
    ranks_of_tuner = _torchrun_of_tuner(CODE_FOLDER.parent / "input/data/sm_drivers")
    if not enabled and ranks_of_tuner is None:
        return None
    if enabled and (other_name := DISTRIBUTIONS[enabled[-1]]):
        log.warning(
            f"distribution {other_name} runs as torch_distributed (torchrun over NCCL, or "
            "gloo on CPUs): AWS has published no SMDDP build since PyTorch 2.5"
        )
    return ranks_of_tuner or int(job.num_gpus)


def command(
    request: Request, here: SageMakerEnvironment, folder: Path
) -> tuple[list[str], str, int]:
    """Return the command line of the program, its launcher in words, and its process count.

    A program of the image counts as one process, because it starts its ranks and sets their
    threads itself.

    Args:
        request: What the job asks for.
        here: Describes the job and this host.
        folder: Folder of the program, HOME or CODE_FOLDER.
    """
    program = folder / request.program
    if folder == HOME:
        if request.ranks is None:
            return [sys.executable, str(program), *request.flags], "one process", 1
        program = program.with_name(TORCHRUN_PROGRAM)
        return [sys.executable, str(program), *request.flags], "torchrun", 1
    args = request.args
    if request.ranks is None:
        return _own_command(request.program, args), "the job's own, one process", 1
    command_line = torchrun_command.command(here, args, request.ranks, program)
    return command_line, "torchrun", torchrun_command.processes(args, request.ranks)
