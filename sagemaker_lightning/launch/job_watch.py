"""The watch of a job's hosts, which ends this host's program when another host is lost."""

import os
from collections.abc import Mapping

from sagemaker_lightning.contract import deadlines, job_summary, rendezvous
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.doctor import checks
from sagemaker_lightning.launch import job_end
from sagemaker_lightning.launch.restarts import Restarts
from sagemaker_lightning.nodes.mesh import StopReason
from sagemaker_lightning.nodes.watchdog import Watchdog
from sagemaker_lightning.process import start_notice
from sagemaker_lightning.process.supervisor import Supervisor


def watchdog(
    here: SageMakerEnvironment,
    program: str,
    hyperparameters: Mapping[str, object],
    supervisor: Supervisor,
    restarts: Restarts,
) -> Watchdog:
    """Return the watchdog of the hosts that train and of the ranks of this host.

    If this host does not train, it watches its own ranks alone.

    Args:
        here: Describes the job and this host.
        program: What the job runs, which must be the same on all hosts.
        hyperparameters: The job's hyperparameters, likewise.
        supervisor: Runs the program.
        restarts: The restarts so far, and how many there may be.
    """
    settings = {
        "the list of hosts": ", ".join(here.hosts),
        "the program's version": here.revision,
        "the program": program,
        "max_restarts": str(restarts.most),
    }
    settings |= {
        f"hyperparameter {name}": job_summary.masked(name, value)
        for name, value in hyperparameters.items()
    }

    may_restart = len(restarts.taken) < restarts.most
    grace = deadlines.ends_after_loss(here.peer_timeout)
    if may_restart:
        grace = deadlines.RESTART_KILLS

    def end_program(reason: StopReason) -> None:
        supervisor.terminate(deadlines.HOOK_KILLS if reason.is_request else grace)

    return Watchdog(
        here.current_host,
        here.hosts if here.takes_part else (here.current_host,),
        settings,
        port=rendezvous.main_port(os.environ) + 1,
        connect_timeout=here.rendezvous_timeout,
        silence_timeout=deadlines.silence(here.peer_timeout),
        ends_by_itself=deadlines.RESTART_KILLS if may_restart else deadlines.ENDS_BY_ITSELF,
        may_restart=may_restart,
        hang_timeout=here.hang_timeout,
        batch_timeout=here.batch_timeout,
        on_reason=end_program,
        restarts=len(restarts.taken),
        program=lambda: supervisor.child.pid if supervisor.child else None,
        reaped=supervisor.statuses,
    )


def meet(
    watchdog: Watchdog,
    here: SageMakerEnvironment,
    program: str,
    hyperparameters: Mapping[str, object],
    restarts: Restarts,
    forks: bool = False,
) -> None:
    """Wait until all hosts are ready; before the first start, print the job's summary.

    Raises Interrupted or OtherFailed if the job ends before.

    Args:
        watchdog: Watches the hosts.
        here: Describes the job and this host.
        program: The program and its launcher, in words.
        hyperparameters: The job's hyperparameters.
        restarts: The restarts so far.
        forks: Whether this host can start the program without its imports.
    """
    if not restarts.taken:
        _print_summary(here, program, hyperparameters)
    if len(here.hosts) > 1:
        start_notice.begin("waiting for the other hosts")
    reason = watchdog.wait_until_all_are_ready(forks)
    start_notice.end()
    if reason:
        raise job_end.error_for(reason)


def _print_summary(
    here: SageMakerEnvironment, program: str, hyperparameters: Mapping[str, object]
) -> None:
    for line in job_summary.lines(here, program, hyperparameters):
        log.info(line)
    for line in checks.summary(checks.Machine(interface=here.network_interface)):
        log.info(line)
