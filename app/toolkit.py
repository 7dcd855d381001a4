"""What runs inside the training toolkit's own process: SAGEMAKER_TRAINING_MODULE=app.toolkit:main.

The toolkit imports and calls `main` in place of its own last step (aws/sagemaker-training-toolkit 5.1.4, trainer.py).
It chooses the program and its launcher, hands signals on, and sees to it that no failure ends in exit status 0:
the toolkit leaves by `finally: sys.exit(exit_code)` with exit_code still 0 where the failure file cannot be written
or the hook leaves by SystemExit.
"""

import json
import logging
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from signal import Signals

from sagemaker_training import entry_point, environment, errors, files, modules, process

from app import failures, hyperparameters, summary, train_torchrun
from app.environment import Environment
from app.supervise import Ended, Stopped, Supervisor

HOME = Path(__file__).resolve().parent.parent  # where the image's own application is
CODE = Path(environment.code_dir)  # where a job's own source is
DISTRIBUTIONS = {
    "sagemaker_torch_distributed_enabled": None,
    "sagemaker_pytorch_ddp_enabled": "pytorchddp",
    "sagemaker_distributed_dataparallel_enabled": "smdistributed.dataparallel",  # SDK 2's pytorchddp, too
}
REFUSED = {
    "sagemaker_mpi_enabled": "mpi",
    "sagemaker_parameter_server_enabled": "parameter_server",
    "sagemaker_pytorch_xla_multi_worker_enabled": "pytorchxla",
}


def main() -> None:
    """Run the job's program; return if it ended well, or raise what makes the toolkit exit with status 1."""
    try:
        with Supervisor() as supervisor:
            _run(supervisor)
        files.write_success_file()
    except BaseException as error:  # SystemExit, too
        raise errors.ClientError(_report(error)) from None


def _run(supervisor: Supervisor) -> None:
    """Prepare the job's source, say what is going to run, run it, and raise ValueError if it does not end well."""
    logging.getLogger("sagemaker-training-toolkit").setLevel(logging.WARNING)  # the summary says it better
    job = environment.Environment()
    given = json.loads(Path(job.input_config_dir, "hyperparameters.json").read_text())
    _unpack(_sent(given, "sagemaker_submit_directory"))
    sys.path.insert(0, str(CODE))  # becomes the program's PYTHONPATH: the image's program finds the job's modules
    environment.write_env_vars(job.to_env_vars())
    folder, name = _program(_sent(given, "sagemaker_program") or job.user_entry_point)
    _install(folder, name)
    command, how = _command(job, folder, name, given)
    for line in summary.lines(Environment.read(), f"{folder / name}, {how}", given):
        print(line, flush=True)
    entry_point._wait_hostname_resolution()
    ended = supervisor.run(command, cwd=CODE if CODE.is_dir() else HOME)
    print(f"{name}: {_how(ended)}", flush=True)
    if ended.status:
        raise ProgramFailed(name, ended)


def _sent(given: dict, name: str) -> str | None:
    """Return one of the toolkit's own hyperparameters, as text; None if it was not sent or is null."""
    value = hyperparameters.text(given.get(name))
    return None if value == "null" else value


class ProgramFailed(Exception):
    """The program did not end well; says how, and why if its stderr tells."""

    def __init__(self, name: str, ended: Ended) -> None:
        why, self.trace = failures.last_error(ended.stderr)
        self.killed = failures.killed_rank(ended.stderr)
        if ended.asked:
            why = "the job was told to stop before the training was done"
        elif self.killed or (ended.status in (-9, 128 + 9) and not self.trace):
            who = f"{self.killed} was killed by SIGKILL: " if self.killed else ""
            why = f"{who}most likely out of host memory; use smaller batches or fewer processes, or a larger instance"
        super().__init__(f"{name} {_how(ended)}: {why or 'nothing on its stderr says why'}")


def _how(ended: Ended) -> str:
    asked = f" after {Signals(ended.asked).name}" if ended.asked else ""
    if ended.status < 0:
        return f"was killed by {Signals(-ended.status).name}{asked}"
    return f"ended with exit status {ended.status}{asked}"


def _unpack(archive: str | None) -> None:
    """Put the job's source into CODE; the toolkit itself would leave it where it is if anything is there."""
    if not archive or Path(archive) == CODE:
        return
    try:
        if archive.endswith(".gz") and not archive.startswith("s3://") and not tarfile.is_tarfile(archive):
            raise ValueError("it is damaged")  # the toolkit would take it for the source itself
        with tempfile.TemporaryDirectory() as folder:
            files.download_and_extract(archive, folder)
            shutil.copytree(folder, CODE, dirs_exist_ok=True)
    except Exception as error:
        raise ValueError(
            f"sagemaker_submit_directory: found {archive}, which could not be unpacked ({error}); allowed is a .tar.gz "
            "that the job's role may read"
        ) from None


def _program(name: str | None) -> tuple[Path, str]:
    """Return the folder and name of the program: the job's own if it has it, else the image's."""
    if not name:
        raise ValueError("SAGEMAKER_PROGRAM: not given; allowed is a file of the job's source or of the image")
    process.validate_entry_point(name)
    for folder in (CODE, HOME):
        if (folder / name).is_file():
            return folder, name
    if (CODE / "setup.py").is_file():
        return CODE, name
    found = ", ".join(sorted(path.name for path in CODE.iterdir())[:10]) if CODE.is_dir() else ""
    raise ValueError(
        f"sagemaker_program: found {name}, which is neither in the job's source (which has: {found or 'nothing'}) nor "
        "in the image; allowed is the path of a file there, e.g. train.py"
    )


def _install(folder: Path, name: str) -> None:
    """Install the source's requirements.txt, or its package, as the toolkit does; the former for our program, too."""
    try:
        if folder == CODE:
            entry_point.install(name, str(CODE), capture_error=True)
        elif modules.has_requirements(str(CODE)):
            modules.install_requirements(str(CODE), capture_error=True)
    except errors._CalledProcessError as error:
        said = [line for line in str(error).splitlines() if "ERROR" in line] or str(error).splitlines()[-1:]
        raise ValueError(
            f"requirements.txt: pip could not install it ({' '.join(said[0].split())}); correct the file, or give the "
            "job a network that reaches the package index"
        ) from None


def _command(job, folder: Path, name: str, given: dict) -> tuple[list[str], str]:
    """Return the command line, and how it launches the program, in words."""
    ours = folder == HOME
    args = hyperparameters.flags(given) if ours else job.to_cmd_args()
    options = job.additional_framework_parameters
    if refused := [words for option, words in REFUSED.items() if options.get(option)]:
        raise ValueError(
            f"distribution: found {refused[0]}, allowed are torch_distributed and none: the image has nothing else"
        )
    chosen = [option for option in DISTRIBUTIONS if options.get(option)]
    if not chosen:
        if ours:
            return [sys.executable, str(folder / name), *args], "one process"
        return process.ProcessRunner(name, args, {}, 1)._create_command(), "the job's own, one process"
    if asked := DISTRIBUTIONS[chosen[-1]]:
        print(
            f"warning: distribution {asked} runs as torch_distributed (torchrun over NCCL, or gloo on CPUs): AWS has "
            "published no SMDDP build since PyTorch 2.5",
            flush=True,
        )
    if not name.endswith(".py"):
        raise ValueError(f"sagemaker_program: found {name}, torchrun allows a .py file only")
    program = HOME / "app" / "train.py" if ours else folder / name
    return train_torchrun.command(Environment.read(), args, job.num_gpus, program), "torchrun"


def _report(error: BaseException) -> str:
    """Write the failure file and return its first line; if it cannot be written, leave at once."""
    mistake = isinstance(error, (ValueError, ProgramFailed, Stopped, errors.ClientError))
    reason = " ".join(str(error).split()) if mistake else failures.explain(type(error).__name__, str(error))
    line = f"error: {reason} [host {os.environ.get('CURRENT_HOST', 'unknown')}]"
    path = Path(environment.output_dir, "failure")
    try:
        # What a rank says that lost another one is not the reason where the launcher knows which one was killed.
        said = path.read_text() if path.is_file() else ""
        replaced = not said or (getattr(error, "killed", "") and said.startswith("error: lost a peer"))
        failures.write(path, line, getattr(error, "trace", ""), mode="w" if replaced else "x")
        return path.read_text().splitlines()[0]
    except OSError as unwritable:
        print(f"{line}\nerror: {path} could not be written: {unwritable.strerror}", file=sys.stderr, flush=True)
        os._exit(1)
