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
import traceback
from collections.abc import Mapping
from pathlib import Path

from sagemaker_training import environment, errors

from sagemaker_lightning.contract import shutdown
from sagemaker_lightning.contract.atomic_files import write_instead
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.hyperparameters import MAX_RESTARTS
from sagemaker_lightning.contract.log import say_last
from sagemaker_lightning.launch import (
    attempts,
    job_end,
    job_watch,
    ownership,
    standby,
    user_program,
)
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.launch.user_program import Program
from sagemaker_lightning.nodes.watchdog import Watchdog
from sagemaker_lightning.process.supervisor import StoppedBeforeStart, Supervisor


def main() -> None:
    """Run the job's program; return if it ended well on all hosts.

    Raises sagemaker_training.errors.ClientError otherwise, which makes the toolkit exit with
    status 1. If the job was asked to stop, this process exits here, with the signal's status.
    """
    supervisor = Supervisor()
    try:
        with supervisor:
            _run(supervisor)
        # The toolkit writes this file itself, and would wait if the program has left a pipe there.
        write_instead(Path(environment.output_dir, "success"), b"")
    except (job_end.Interrupted, StoppedBeforeStart) as error:
        if isinstance(error, StoppedBeforeStart):
            # These variables name the folder of the checkpoints.
            environment.write_env_vars(environment.Environment().to_env_vars())
            error = job_end.Interrupted(str(error), supervisor.stop_signal)
        say_last(_report(error))
        ownership.give_to_owners()
        # The toolkit itself can only end with a success or a failure; this is neither.
        os._exit(shutdown.status(error.number))
    except BaseException as error:  # SystemExit, too
        if not isinstance(error, job_end.ERRORS):
            traceback.print_exception(error)
        raise errors.ClientError(_report(error)) from None


def _run(supervisor: Supervisor) -> None:
    """Meet the other hosts and run the program while they live.

    Raises an exception, such as UserError, ProgramFailed, OtherFailed or Interrupted, if the job
    does not end well; the other hosts learn of it.
    """
    # The toolkit's log of the job's settings is left out: our summary says it better.
    logging.getLogger("sagemaker-training-toolkit").setLevel(logging.WARNING)
    hyperparameters = json.loads(Path(environment.hyperparameters_file_dir).read_text())
    # The toolkit would tell the program the image's own (SM_MODULE_NAME), if there are both.
    if program := user_program.program_of(hyperparameters)[0]:
        os.environ["SAGEMAKER_PROGRAM"] = program
    job = environment.Environment()
    # The image's program finds the job's modules. The toolkit itself would make all of this
    # process's path the program's: a virtual environment that the job makes would then take the
    # image's packages before its own.
    python_path = [str(user_program.CODE_FOLDER), os.environ.get("PYTHONPATH")]
    for name in MAX_RESTARTS:  # the program may refuse a flag that it does not have
        job.hyperparameters.pop(name, None)
    environment.write_env_vars(job.to_env_vars())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    here = SageMakerEnvironment.read()
    request = user_program.Request.read(job, here, hyperparameters)
    programs: list[Program | None] = []  # one, once it is prepared

    def attempt(watchdog: Watchdog, restarts: Restarts) -> None:
        if not programs:
            programs.append(user_program.prepare(request, here))
        if programs[0]:
            everything = (here, hyperparameters, supervisor, watchdog, restarts, aside)
            _run_program(programs[0], *everything)

    with standby.Standby(here, supervisor) as aside:
        attempts.run(here, request.program, hyperparameters, supervisor, attempt)


def _run_program(
    program: Program,
    here: SageMakerEnvironment,
    hyperparameters: Mapping[str, object],
    supervisor: Supervisor,
    watchdog: Watchdog,
    restarts: Restarts,
    aside: standby.Standby,
) -> None:
    """Print a summary of the job, and run the program once.

    Raises an exception if the program does not end well on every host: Interrupted, OtherFailed,
    ProgramFailed, NoModel or another UserError.

    Args:
        program: The program.
        here: Describes the job and this host.
        hyperparameters: The job's hyperparameters, those for the toolkit included.
        supervisor: Runs the program.
        watchdog: Watches the other hosts and this host's ranks.
        restarts: The restarts so far.
        aside: Starts the program again without its imports.
    """
    what = f"{program.folder / program.name}, {program.launcher}"
    job_watch.meet(watchdog, here, what, hyperparameters, restarts, aside.is_ready)
    end = aside.run(program.command, program.cwd, program.variables, watchdog, restarts)
    job_end.judge(
        program.name,
        end,
        supervisor,
        watchdog,
        missing_model=lambda: program.missing_model(here),
        needs_model=program.is_of_image,
    )


def _report(error: BaseException) -> str:
    """Write the failure file and return its first line; see `job_end.report`."""
    return job_end.report(
        error,
        Path(environment.output_dir, "failure"),
        os.environ.get("CURRENT_HOST", "unknown"),
    )
