"""Runs a job that SageMaker's SDK 3 starts by a shell script, in place of the shell.

    python -m sagemaker_lightning.launch.shell_job COMMAND

With `SourceCode`, SDK 3 (3.27, train/model_trainer.py and templates.py) replaces the image's entry
point by `/bin/bash -c COMMAND`. COMMAND runs sm_train.sh, which runs a driver, which runs the job's
program. None of the three passes a signal on, nobody watches the other hosts, and the reason of a
failure is the driver's traceback. bash_env.sh makes this process out of the first shell. It does
for such a job what launch/toolkit_hook.py does for `train`.
"""

import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from sagemaker_lightning.contract import (
    job_config,
    rendezvous,
    shutdown,
    streams,
)
from sagemaker_lightning.contract.environment import (
    SageMakerEnvironment,
    current_host,
    variables_of,
)
from sagemaker_lightning.contract.log import say_last
from sagemaker_lightning.doctor import gpu_driver
from sagemaker_lightning.launch import (
    attempts,
    job_end,
    job_watch,
    ownership,
    standby,
    torchrun_command,
)
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.nodes.watchdog import Watchdog
from sagemaker_lightning.process.supervisor import (
    ProgramEnd,
    Started,
    StoppedBeforeStart,
    Supervisor,
)

BASE = Path("/opt/ml")
DRIVERS = "/sm_drivers/"
"""In the path of each of the SDK's own programs."""
SCRIPT = "sm_train.sh"
# What the SDK's own programs print once the job's program, or pip, has ended. Nothing after it says
# why.
AFTERWARDS = re.compile(
    r"^(Command failed with exit code -?\d+\. Traceback: |\++ handle_error$"
    r"|An error occurred with exit code \d+\n?\Z"  # the last line: a program may print such, too
    r'|Traceback .*\n  File "[^"]*/sm_drivers/.*\n(  .*\n)*subprocess\.CalledProcessError: )',
    re.M,
)
# The driver reads what the program prints as UTF-8, dies of anything else, and takes it along.
NO_UTF_8 = re.compile(
    r"^Traceback .*\n(?:  .*\n)*?"
    r'  File "[^"]*/sm_drivers/.*, in log_subprocess_output\n(?:  .*\n)*'
    r"(UnicodeDecodeError: .*)$",
    re.M,
)
DRIVER_DIED = (
    "SDK 3's driver, which reads what the program prints, died of a byte that is not UTF-8 and "
    r"ended the program (\1); print UTF-8 alone"
)
VARIABLES = re.compile(r"^Environment Variables:\n(?:.*\n)*?(?=\++ set \+x$)", re.M)
"""What the SDK's script prints of all variables of the job, before it runs the program."""
COMMANDS = re.compile(
    r"^(\++ .*|Executing command: .*|SM_[A-Z_]+=.*|Running [\w ]+ driver)(\n|\Z)", re.M
)
"""What the SDK's script (set -x) and its drivers print of each command that they run, and before
it: the job's variables."""
# The driver exits with -N if signal N has ended the program, and a status has 8 bits. 255 is more
# likely the program's own -1 than SIGHUP.
KILLED = {256 - number: -number for number in signal.Signals if number != signal.SIGHUP}
SHELLS_OWN = set(";&|<>!\n")
"""Characters of a command with which it is not one program, or not with the shell's own streams."""
# What these programs write to the failure file. It names no cause; a traceback of the job's own
# program does.
NO_REASON = re.compile(
    r"Traceback \(most recent call last\).*/sm_drivers/|Training Execution failed", re.DOTALL
)


def main() -> None:
    """Run the command that the command line has; exit with a status above 0 if it fails."""
    streams.prepare()
    command = sys.argv[1]
    supervisor = Supervisor(is_deaf=is_the_sdks)
    try:
        with supervisor:
            status = _run(command, supervisor)
    except BaseException as error:
        if isinstance(error, StoppedBeforeStart):
            error = job_end.Interrupted(str(error), supervisor.stop_signal)
        if not isinstance(error, job_end.ERRORS):
            traceback.print_exception(error)
        line = job_end.report(error, BASE / "output/failure", current_host(), NO_REASON.match)
        say_last(line)
        status = 1
        if isinstance(error, job_end.Interrupted):
            status = shutdown.status(error.number)
        elif isinstance(error, job_end.ProgramFailed):
            status = error.status
    ownership.give_to_owners(BASE)
    sys.exit(status)


def _run(command: str, supervisor: Supervisor) -> int:
    """Meet the other hosts and run the command while they live; return 0.

    Raises an exception, such as UserError, ProgramFailed, OtherFailed or Interrupted, if the job
    does not end well; the other hosts learn of it.
    """
    job_config.check(BASE / "input/config")
    # The SDK's script sets more of them, for its own program.
    gpus = len(gpu_driver.Host.read(Path("/")).models)
    os.environ.update(variables_of(BASE, gpus) | os.environ)
    here = SageMakerEnvironment.read()
    source = source_code(BASE)
    name = program(source)
    variables = rendezvous.variables(here) | torchrun_command.VARIABLES | os.environ

    def attempt(watchdog: Watchdog, restarts: Restarts) -> None:
        what = f"{name}, by SDK 3's script"
        job_watch.meet(watchdog, here, what, here.hyperparameters, restarts, aside.is_ready)
        started = ["/bin/bash", "-c", command]
        end = aside.run(started, Path.cwd(), variables, watchdog, restarts, keeps_stdout=True)
        if not isinstance(supervisor.child, Started):
            end = of_program(end)
        failure = BASE / "output/failure"
        job_end.judge(name, end, supervisor, watchdog, script_failure=failure)

    with standby.Standby(
        here, supervisor, is_the_sdks if is_one_program(source) else None
    ) as aside:
        attempts.run(here, name, here.hyperparameters, supervisor, attempt)
    return 0


def source_code(base: Path) -> Mapping[str, object]:
    """Return the job's `SourceCode` as SDK 3 notes it; {} if it has not.

    Args:
        base: The job's folder, /opt/ml.
    """
    file = base / "input/data/sm_drivers/sourcecode.json"
    return job_config.read(file) if file.is_file() else {}


def program(source: Mapping[str, object]) -> str:
    """Return what a job of this `SourceCode` runs: its entry script or its command."""
    words = str(source.get("entry_script") or source.get("command") or SCRIPT).split()
    return " ".join(words)[:100]


def is_one_program(source: Mapping[str, object]) -> bool:
    """Return whether the SDK's script starts one program, and does nothing after its end.

    A command may be more than one for the shell that evaluates it.
    """
    command = str(source.get("command") or "").strip()
    return not set(command) & SHELLS_OWN if command else bool(source.get("entry_script"))


def is_the_sdks(command_line: list[str]) -> bool:
    """Return whether a process is one of SDK 3's own, given by its command line.

    It dies of a signal, and the job's program, which may be saving, continues without it.
    """
    return any(DRIVERS in word or SCRIPT in word for word in command_line)


def of_program(end: ProgramEnd) -> ProgramEnd:
    """Return how the job's program ended, as SDK 3's script and driver have said.

    Args:
        end: How the script ended, and what all of them printed.
    """
    status = KILLED.get(end.status, end.status)
    printed = end.stderr
    if after := AFTERWARDS.search(printed):
        printed = printed[: after.start()]
    printed = NO_UTF_8.sub(DRIVER_DIED, COMMANDS.sub("", VARIABLES.sub("", printed)))
    return ProgramEnd(status, end.stop_signal, indented(printed))


def indented(printed: str) -> str:
    """Return a log in which the lines of tracebacks are indented again, as Python prints them.

    The driver has stripped each line of the program's log.
    """
    lines = []
    is_trace = is_code = False
    for line in printed.splitlines():
        bare = re.sub(r"^\[rank\d+\]:\s*", "", line)
        if re.match(
            r"Traceback \(most recent call last|.*hread .*\(most recent call first\):$", bare
        ):
            is_trace, is_code = True, False
        elif re.match(rf'File ".*", line \d+{"" if is_trace else "$"}', bare):
            lines.append(f"  {bare}")
            is_trace = True  # that of a file that cannot be compiled has no first line
            is_code = '"<' not in bare  # of code that no file has, Python shows no line
            continue
        elif is_trace and (is_code or not bare.strip("~^ ") or bare.startswith("[Previous line")):
            lines.append(f"    {bare}")
            is_code = False
            continue
        else:
            is_trace = is_trace and line.startswith(" ")
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
