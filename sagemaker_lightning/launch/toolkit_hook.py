"""What runs inside the training toolkit's own process.

SAGEMAKER_TRAINING_MODULE=sagemaker_lightning.launch.toolkit_hook:main, which the image sets, has it run there.
The toolkit imports and calls `main` in place of its own last step (aws/sagemaker-training-toolkit 5.1.4, trainer.py).
It starts the job's program on this node when all nodes are there, hands signals on, ends it when another node is lost,
and sees to it that no failure ends in exit status 0: the toolkit leaves by `finally: sys.exit(exit_code)` with
exit_code still 0 where the failure file cannot be written or the hook leaves by SystemExit.
"""

import json
import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from signal import Signals

from sagemaker_training import environment, errors, files

from sagemaker_lightning.contract import failures, job_summary, rendezvous, shutdown
from sagemaker_lightning.contract.environment import Environment
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.launch import requirements, torchrun_command, user_program
from sagemaker_lightning.nodes.mesh import Verdict
from sagemaker_lightning.nodes.watchdog import Watch
from sagemaker_lightning.process import start_notice, threads
from sagemaker_lightning.process.supervisor import STOP_SECONDS, Ended, Stopped, Supervisor

# Exit statuses of a program that somebody else has told to stop, and by which signal.
STOPPED = {
    sign: number for number in shutdown.SIGNALS for sign in (-number, shutdown.status(number))
}


def main() -> None:
    """Run the job's program; return if it ended well everywhere, or raise what has the toolkit exit with status 1."""
    supervisor = Supervisor()
    try:
        with supervisor:
            _run(supervisor)
        files.write_success_file()
    except (Interrupted, Stopped) as error:
        if isinstance(error, Stopped):
            environment.write_env_vars(
                environment.Environment().to_env_vars()
            )  # where checkpoints are
            error = Interrupted(str(error), supervisor.asked)
        print(_report(error), file=sys.stderr, flush=True)
        os._exit(
            shutdown.status(error.number)
        )  # the toolkit knows no way out that is neither a success nor a failure
    except BaseException as error:  # SystemExit, too
        if not isinstance(error, MEANT):
            traceback.print_exception(error)
        raise errors.ClientError(_report(error)) from None


def _run(supervisor: Supervisor) -> None:
    """Meet the other hosts, run the program while they live, and raise UserError or ProgramFailed if it goes wrong."""
    logging.getLogger("sagemaker-training-toolkit").setLevel(
        logging.WARNING
    )  # the summary says it better
    job = environment.Environment()
    given = json.loads(Path(job.input_config_dir, "hyperparameters.json").read_text())
    # It becomes the program's PYTHONPATH: the image's program finds the job's modules.
    sys.path.insert(0, str(user_program.CODE))
    environment.write_env_vars(job.to_env_vars())
    here = Environment.read()
    with _watch(here, given, supervisor) as watch:
        try:
            _watched(job, here, given, supervisor, watch)
        except BaseException as error:
            found = (
                Interrupted(str(error), supervisor.asked) if isinstance(error, Stopped) else error
            )
            where = (
                ""
                if isinstance(found, (OtherFailed, Interrupted))
                else f"host {here.current_host}: "
            )
            watch.fail(f"{where}{_reason(found)}", stopped=isinstance(found, Interrupted))
            if found is error:
                raise
            raise found from None


def _watched(job, here: Environment, given: dict, supervisor: Supervisor, watch: Watch) -> None:
    """Prepare the job's source, say what is going to run, run it, and raise if it does not end well on every host."""
    user_program.unpack(user_program.sent(given, "sagemaker_submit_directory"))
    folder, name = user_program.find(
        user_program.sent(given, "sagemaker_program") or job.user_entry_point
    )
    if folder == user_program.HOME and not here.takes_part:
        print(
            f"{here.current_host} takes no part in the training, which is for {', '.join(here.hosts)}",
            flush=True,
        )
        return
    requirements.install(user_program.CODE, name, own=folder == user_program.CODE)
    command, how, processes = user_program.command(job, here, folder, name, given)
    for line in job_summary.lines(here, f"{folder / name}, {how}", given):
        print(line, flush=True)
    if len(here.hosts) > 1:
        start_notice.begin("waiting for the other hosts")
    verdict = watch.wait_until_all_are_ready()
    start_notice.done()
    if verdict:
        raise _because_of(verdict)
    # The image's own programs see to their threads by themselves; torchrun would leave each rank a single one.
    shares = threads.variables(processes) if folder != user_program.HOME else {}
    variables = rendezvous.variables(here) | torchrun_command.VARIABLES | shares | os.environ
    variables["SAGEMAKER_LIGHTNING_WATCH"] = str(watch.path)
    cwd = user_program.CODE if user_program.CODE.is_dir() else user_program.HOME
    before = user_program.written(here.model_dir)
    ended = supervisor.run(command, cwd=cwd, variables=variables)
    watch.ended = True
    if supervisor.grace is None or ended.asked:
        print(f"{name}: {_how(ended.status, ended.asked)}", flush=True)
    else:  # by this process, and the reason is another's
        print(f"{name}: was ended, as a rank or another host has failed", flush=True)
    failed = ProgramFailed(name, ended) if ended.status else None
    puzzled = failed and not (failed.killed or ended.asked)
    puzzled = puzzled and (
        failed.lost_a_peer or (watch.bereft and not watch.known)
    )  # the log alone may mislead
    verdict = watch.wait_for_verdict() if puzzled else watch.known
    if failed and verdict and verdict.stopped:
        raise _because_of(verdict, ended.asked)
    told = (
        STOPPED.get(ended.status) if supervisor.grace is None else None
    )  # by somebody else than this process
    if failed and (ended.asked or told):
        raise Interrupted(f"{name} {_how(ended.status, ended.asked)}", ended.asked or told)
    if verdict and (puzzled or not verdict.here or supervisor.grace is not None):
        raise _because_of(verdict)
    if failed:
        raise failed
    if missing := user_program.missing_model(folder, name, here, before):
        if folder == user_program.HOME:
            raise Interrupted(missing, ended.asked) if ended.asked else NoModel(missing)
        print(f"warning: {missing}", flush=True)
    if verdict := watch.wait_until_all_are_done():
        raise _because_of(verdict)


def _watch(here: Environment, given: dict, supervisor: Supervisor) -> Watch:
    """Return the watch between the hosts that train; one over this host's ranks alone if it is none of them."""
    told = {"the list of hosts": ", ".join(here.hosts), "the program's version": here.revision}
    told["the program"] = user_program.sent(given, "sagemaker_program") or os.environ.get(
        "SAGEMAKER_PROGRAM", ""
    )
    told |= {
        f"hyperparameter {name}": job_summary.masked(name, value) for name, value in given.items()
    }

    def end(verdict: Verdict) -> None:
        supervisor.end(STOP_SECONDS if verdict.stopped else here.peer_timeout / 6)

    return Watch(
        here.current_host,
        here.hosts if here.takes_part else (here.current_host,),
        told,
        port=rendezvous.main_port(os.environ) + 1,
        appear=here.rendezvous_timeout,
        silence=here.peer_timeout / 2,
        on_verdict=end,
    )


class OtherFailed(Exception):
    """Another host, or a rank of this one, is the cause of the end."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.why)


class NoModel(UserError):
    """The image's own program left as if all were well, and has written no model."""

    def __init__(self, missing: str) -> None:
        super().__init__(
            f"{missing}: code of the job has ended it early (os._exit(0), SystemExit or the like); return instead"
        )


class Interrupted(Exception):
    """The job was told to stop, and has not come to its end; says from which step to resume."""

    def __init__(self, how: str, number: int | None = None) -> None:
        self.number = number or signal.SIGTERM
        super().__init__(
            how
            if how.startswith("interrupted")
            else shutdown.words(shutdown.newest_step(Environment.read().checkpoint_dir), how)
        )


def _because_of(verdict: Verdict, asked: int | None = None) -> Exception:
    """Return what to raise for a verdict on another host, or on a rank of this one, which was `asked` to stop."""
    return Interrupted(verdict.why, asked) if verdict.stopped else OtherFailed(verdict)


class ProgramFailed(Exception):
    """The program did not end well; says how, and why if its stderr tells."""

    def __init__(self, name: str, ended: Ended) -> None:
        why, self.trace = failures.last_error(ended.stderr)
        rank, status = failures.ended_rank(ended.stderr)
        self.killed = rank if status == -signal.SIGKILL else ""
        self.lost_a_peer = why.startswith(failures.LOST)
        if self.killed or (status < 0 and not self.trace):
            why = f"{rank} {_how(status)}{f': {failures.OUT_OF_MEMORY}' if self.killed else ''}"
        elif ended.status in (-9, 128 + 9) and not (
            rank or self.trace
        ):  # nor by Lightning, as a rank had ended
            why = failures.OUT_OF_MEMORY
        super().__init__(
            f"{name} {_how(ended.status, ended.asked)}: {why or 'nothing on its stderr says why'}"
        )


def _how(status: int, asked: int | None = None) -> str:
    """Return how a process ended, and the signal after which it did; `status` is -N if signal N killed it."""
    after = f" after {Signals(asked).name}" if asked else ""
    return (
        f"was killed by {Signals(-status).name}{after}"
        if status < 0
        else f"ended with exit status {status}{after}"
    )


MEANT = (UserError, ProgramFailed, OtherFailed, Interrupted, errors.ClientError)
"""What is raised on purpose and says all in one line; of anything else, the traceback is shown as well."""


def _reason(error: BaseException) -> str:
    """Return why, in one line; what to do about it, if that is known."""
    meant = isinstance(error, MEANT)
    return (
        " ".join(str(error).split())
        if meant
        else failures.explain(type(error).__name__, str(error))
    )


def _report(error: BaseException) -> str:
    """Write the failure file and return its first line; if it cannot be written, leave at once."""
    kind = "" if isinstance(error, Interrupted) else "error: "
    line = f"{kind}{_reason(error)} [host {os.environ.get('CURRENT_HOST', 'unknown')}]"
    path = Path(environment.output_dir, "failure")
    try:
        # What a rank says that lost another one, or that was ended for that, is not the reason where that is known.
        said = path.read_text() if path.is_file() else ""
        knows = isinstance(error, OtherFailed) or getattr(error, "killed", "")
        replaced = not said or (
            knows and said.startswith((f"error: {failures.LOST}", "interrupted"))
        )
        trace = (
            getattr(error, "trace", "")
            if isinstance(error, MEANT)
            else "".join(traceback.format_exception(error))
        )
        failures.write(path, line, trace, mode="w" if replaced else "x")
        return path.read_text().splitlines()[0]
    except OSError as unwritable:
        print(
            f"{line}\nerror: {path} could not be written: {unwritable.strerror}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
