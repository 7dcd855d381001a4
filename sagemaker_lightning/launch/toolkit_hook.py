"""Runs the job's program inside the training toolkit's own process.

The image sets SAGEMAKER_TRAINING_MODULE=sagemaker_lightning.launch.toolkit_hook:main. So the
toolkit imports and calls `main` in place of its own last step (aws/sagemaker-training-toolkit
5.1.4, trainer.py).

`main` starts the program on this node when all nodes are ready, passes signals on to it, and ends
it when another node is lost. It also makes sure that no failure ends in exit status 0: the toolkit
leaves by `finally: sys.exit(exit_code)`, and exit_code is still 0 if the failure file cannot be
written or the hook leaves by SystemExit.
"""

import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from signal import Signals

from sagemaker_training import environment, errors

from sagemaker_lightning.contract import (
    deadlines,
    failures,
    job_summary,
    rendezvous,
    shutdown,
)
from sagemaker_lightning.contract.atomic_files import write_instead
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.doctor import checks
from sagemaker_lightning.launch import ownership, requirements, torchrun_command, user_program
from sagemaker_lightning.nodes.mesh import StopReason
from sagemaker_lightning.nodes.watchdog import Watchdog
from sagemaker_lightning.process import start_notice, threads
from sagemaker_lightning.process.supervisor import ProgramEnd, StoppedBeforeStart, Supervisor

# Exit statuses of a program that something other than this process told to stop, each with the
# signal that it used.
STOP_SIGNALS = {
    sign: number for number in shutdown.SIGNALS for sign in (-number, shutdown.status(number))
}


def main() -> None:
    """Run the job's program; return if it ended well on all hosts.

    Raises sagemaker_training.errors.ClientError otherwise, which makes the toolkit exit with
    status 1. If the job was told to stop, this process exits here, with the signal's status.
    """
    supervisor = Supervisor()
    try:
        with supervisor:
            _run(supervisor)
        # The toolkit writes this file, too, and would wait at a pipe that the program has left.
        write_instead(Path(environment.output_dir, "success"), b"")
    except (Interrupted, StoppedBeforeStart) as error:
        if isinstance(error, StoppedBeforeStart):
            # These variables name the folder of the checkpoints.
            environment.write_env_vars(environment.Environment().to_env_vars())
            error = Interrupted(str(error), supervisor.stop_signal)
        print(_report(error), file=sys.stderr, flush=True)
        ownership.give_to_owners()
        # The toolkit itself can only end with a success or a failure; this is neither.
        os._exit(shutdown.status(error.number))
    except BaseException as error:  # SystemExit, too
        if not isinstance(error, EXPECTED_ERRORS):
            traceback.print_exception(error)
        raise errors.ClientError(_report(error)) from None


def _run(supervisor: Supervisor) -> None:
    """Meet the other hosts and run the program while they live.

    Raises an exception, such as UserError, ProgramFailed, OtherFailed or Interrupted, if the job
    does not end well; the other hosts are told of it.
    """
    # The toolkit's log of the job's settings is left out: our summary says it better.
    logging.getLogger("sagemaker-training-toolkit").setLevel(logging.WARNING)
    job = environment.Environment()
    hyperparameters = json.loads(Path(job.input_config_dir, "hyperparameters.json").read_text())
    # The image's program finds the job's modules. The toolkit itself would make all of this
    # process's path the program's: a virtual environment that the job makes would then take the
    # image's packages before its own.
    python_path = [str(user_program.CODE_FOLDER), os.environ.get("PYTHONPATH")]
    environment.write_env_vars(job.to_env_vars())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    here = SageMakerEnvironment.read()
    with _watchdog(here, hyperparameters, supervisor) as watchdog:
        try:
            _run_program(job, here, hyperparameters, supervisor, watchdog)
        except BaseException as error:
            cause = (
                Interrupted(str(error), supervisor.stop_signal)
                if isinstance(error, StoppedBeforeStart)
                else error
            )
            host = (
                ""
                if isinstance(cause, (OtherFailed, Interrupted))
                else f"host {here.current_host}: "
            )
            watchdog.fail(f"{host}{_reason(cause)}", is_request=isinstance(cause, Interrupted))
            if cause is error:
                raise
            raise cause from None


def _run_program(
    job,
    here: SageMakerEnvironment,
    hyperparameters: dict,
    supervisor: Supervisor,
    watchdog: Watchdog,
) -> None:
    """Prepare the job's source, print a summary, and run the program.

    Raises an exception if the program does not end well on every host: Interrupted, OtherFailed,
    ProgramFailed, NoModel or another UserError.

    Args:
        job: The toolkit's own Environment.
        here: Our view of the same variables.
        hyperparameters: The job's hyperparameters, those for the toolkit included.
        supervisor: Runs the program.
        watchdog: Watches the other hosts and this host's ranks.
    """
    user_program.unpack(user_program.sent(hyperparameters, "sagemaker_submit_directory"))
    folder, name = user_program.find(
        user_program.sent(hyperparameters, "sagemaker_program") or job.user_entry_point
    )
    if folder == user_program.HOME and not here.takes_part:
        print(
            f"{here.current_host} takes no part in the training, which is for "
            f"{', '.join(here.hosts)}",
            flush=True,
        )
        return
    requirements.install(user_program.CODE_FOLDER, name, own=folder == user_program.CODE_FOLDER)
    command, launcher, processes = user_program.command(job, here, folder, name, hyperparameters)
    for line in job_summary.lines(here, f"{folder / name}, {launcher}", hyperparameters):
        print(line, flush=True)
    for line in checks.summary(checks.Machine(interface=here.network_interface)):
        print(line, flush=True)
    if len(here.hosts) > 1:
        start_notice.begin("waiting for the other hosts")
    reason = watchdog.wait_until_all_are_ready()
    start_notice.end()
    if reason:
        raise _error_for(reason)
    # The image's own programs set their threads themselves. For others we do, because torchrun
    # would leave each rank a single thread.
    thread_variables = threads.thread_variables(processes) if folder != user_program.HOME else {}
    variables = (
        rendezvous.variables(here) | torchrun_command.VARIABLES | thread_variables | os.environ
    )
    variables["SAGEMAKER_LIGHTNING_WATCH"] = str(watchdog.path)
    cwd = user_program.CODE_FOLDER if user_program.CODE_FOLDER.is_dir() else user_program.HOME
    files_before = user_program.written(here.model_dir)
    program_end = supervisor.run(command, cwd=cwd, variables=variables)
    watchdog.program_ended()
    if supervisor.grace is None or program_end.stop_signal:
        print(f"{name}: {_describe_end(program_end.status, program_end.stop_signal)}", flush=True)
    else:  # this process ended the program, for a reason that something else has given
        print(f"{name}: was ended because a rank or another host failed", flush=True)
    failed = ProgramFailed(name, program_end) if program_end.status else None
    # The program's own log may mislead: if a rank has lost a peer, the cause is elsewhere.
    is_unexplained = failed and not (failed.killed or program_end.stop_signal)
    is_unexplained = is_unexplained and (
        failed.lost_a_peer or (watchdog.lost_peer and not watchdog.known_reason)
    )
    reason = watchdog.wait_for_reason() if is_unexplained else watchdog.known_reason
    if failed and reason and reason.is_request:
        raise _error_for(reason, program_end.stop_signal)
    # The signal by which something other than this process has told the program to stop.
    others_signal = STOP_SIGNALS.get(program_end.status) if supervisor.grace is None else None
    if failed and (program_end.stop_signal or others_signal):
        raise Interrupted(
            f"{name} {_describe_end(program_end.status, program_end.stop_signal)}",
            program_end.stop_signal or others_signal,
        )
    if reason and (is_unexplained or not reason.is_local or supervisor.grace is not None):
        raise _error_for(reason)
    if failed:
        raise failed
    if missing := user_program.missing_model(folder, name, here, files_before):
        if folder == user_program.HOME:
            raise (
                Interrupted(missing, program_end.stop_signal)
                if program_end.stop_signal
                else NoModel(missing)
            )
        print(f"warning: {missing}", flush=True)
    if reason := watchdog.wait_until_all_are_done():
        raise _error_for(reason)


def _watchdog(
    here: SageMakerEnvironment, hyperparameters: dict, supervisor: Supervisor
) -> Watchdog:
    """Return the watchdog of the hosts that train and of the ranks of this host.

    If this host does not train, it watches its own ranks alone.
    """
    settings = {
        "the list of hosts": ", ".join(here.hosts),
        "the program's version": here.revision,
    }
    settings["the program"] = user_program.sent(
        hyperparameters, "sagemaker_program"
    ) or os.environ.get("SAGEMAKER_PROGRAM", "")
    settings |= {
        f"hyperparameter {name}": job_summary.masked(name, value)
        for name, value in hyperparameters.items()
    }

    def end_program(reason: StopReason) -> None:
        supervisor.terminate(
            deadlines.HOOK_KILLS
            if reason.is_request
            else deadlines.ends_after_loss(here.peer_timeout)
        )

    return Watchdog(
        here.current_host,
        here.hosts if here.takes_part else (here.current_host,),
        settings,
        port=rendezvous.main_port(os.environ) + 1,
        connect_timeout=here.rendezvous_timeout,
        silence_timeout=deadlines.silence(here.peer_timeout),
        on_reason=end_program,
    )


class OtherFailed(Exception):
    """The program ended because of another host, or because of a rank of this one."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.why)


class NoModel(UserError):
    """The image's own program ended with exit status 0 and has written no model."""

    def __init__(self, missing: str) -> None:
        super().__init__(
            f"{missing}: code of the job has ended it early (os._exit(0), SystemExit or the like); "
            "return instead"
        )


class Interrupted(Exception):
    """The job was told to stop; the text says from which step to resume.

    Args:
        reason: What stopped it, or a line about that which the program has made already.
        number: The signal that told it to stop; SIGTERM if None.
    """

    def __init__(self, reason: str, number: int | None = None) -> None:
        self.number = number or signal.SIGTERM
        if not reason.startswith("interrupted"):
            here = SageMakerEnvironment.read()
            home = here.checkpoint_home(here.checkpoint_dir)
            reason = shutdown.interruption_by_names(home, reason)
        super().__init__(reason)


def _error_for(reason: StopReason, asked: int | None = None) -> Exception:
    """Return what to raise for a reason to end that another host, or a rank of this one, has given.

    `asked` is the signal that told the program of this host to stop, if one did.
    """
    return Interrupted(reason.why, asked) if reason.is_request else OtherFailed(reason)


class ProgramFailed(Exception):
    """The program did not end well; the text says how, and why if its stderr tells.

    Attributes:
        trace: The traceback of the error; "" if stderr has none.
        killed: The rank that SIGKILL ended, in words; "" if there is none.
        lost_a_peer: Whether the error is that a rank lost another one.
    """

    def __init__(self, name: str, program_end: ProgramEnd) -> None:
        why, self.trace = failures.last_error(program_end.stderr)
        rank, status = failures.ended_rank(program_end.stderr)
        self.killed = rank if status == -signal.SIGKILL else ""
        self.lost_a_peer = why.startswith(failures.LOST_PEER)
        if self.killed or (status < 0 and not self.trace):
            advice = f": {failures.OUT_OF_MEMORY}" if self.killed else ""
            why = f"{rank} {_describe_end(status)}{advice}"
        # SIGKILL, and it was not Lightning that sent it because a rank had ended.
        elif program_end.status in (-9, 128 + 9) and not (rank or self.trace):
            why = failures.OUT_OF_MEMORY
        super().__init__(
            f"{name} {_describe_end(program_end.status, program_end.stop_signal)}: "
            f"{why or 'nothing on its stderr says why'}"
        )


def _describe_end(status: int, asked: int | None = None) -> str:
    """Return in words how a process ended.

    Args:
        status: Its exit status, -N if signal N killed it.
        asked: The signal that told it to stop before, if one did.
    """
    after = f" after {Signals(asked).name}" if asked else ""
    return (
        f"was killed by {Signals(-status).name}{after}"
        if status < 0
        else f"ended with exit status {status}{after}"
    )


EXPECTED_ERRORS = (UserError, ProgramFailed, OtherFailed, Interrupted, errors.ClientError)
"""The errors that are raised on purpose: their one line says all.

Any other error is shown with its traceback.
"""


def _reason(error: BaseException) -> str:
    """Return in one line why the job failed and, if known, what to do about it."""
    meant = isinstance(error, EXPECTED_ERRORS)
    return (
        " ".join(str(error).split())
        if meant
        else failures.explain(type(error).__name__, str(error))
    )


def _report(error: BaseException) -> str:
    """Write the failure file and return its first line.

    If the file cannot be written, print the line and end this process with status 1.
    """
    prefix = "" if isinstance(error, Interrupted) else "error: "
    line = f"{prefix}{_reason(error)} [host {os.environ.get('CURRENT_HOST', 'unknown')}]"
    path = Path(environment.output_dir, "failure")
    try:
        # A rank, or the job's own program, may have written the file first. If a rank only lost
        # another one, or was stopped because of that, what it wrote is not the reason, and the
        # reason replaces it if we know.
        knows = isinstance(error, OtherFailed) or getattr(error, "killed", "")
        effects = (f"error: {failures.LOST_PEER}", "interrupted")
        replaces = knows and failures.written(path).startswith(effects)
        trace = (
            getattr(error, "trace", "")
            if isinstance(error, EXPECTED_ERRORS)
            else "".join(traceback.format_exception(error))
        )
        failures.write(path, line, trace, replaces)
        return failures.written(path).splitlines()[0]
    except OSError as unwritable:
        print(
            f"{line}\nerror: {path} could not be written: {unwritable.strerror}",
            file=sys.stderr,
            flush=True,
        )
        ownership.give_to_owners()
        os._exit(1)
