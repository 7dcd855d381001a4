"""The deadlines of a job in one table, in seconds, each with its reason.

Deadlines nest: what must end first has the shorter one. test_deadlines.py checks that.
"""

# From SIGTERM to the end of a container: each waits for the one before.

BATCH_ENDS = 25.0
"""From the signal to the end of a process that reaches no batch's end.

Another rank may hang. Twice the time of its last batch counts instead, if that is longer.
"""
CHECKPOINT_IS_WRITTEN = 90.0
"""From the signal to the end of a process that writes its checkpoint."""
CHECKPOINT_IS_COPIED = 60.0
"""From the ranks' agreement on a stop to the end of the wait for the checkpoint's copy in S3.

The batch at whose end they agree has taken its own time since the signal.
"""
TORCHRUN_KILLS = 100.0
"""From the signal to torchrun's SIGKILL for its ranks. The checkpoint is written by then."""
STOP_IS_LATE = 5.0
"""From the signal to a line that says that the program still runs.

`docker stop` kills 10 s after its signal by default; nobody can say more then.
"""
HOOK_KILLS = 110.0
"""From the signal to the toolkit hook's SIGKILL for the program. torchrun has ended by then.

The rest of SageMaker's time is for the failure file.
"""
SAGEMAKER_KILLS = 120.0
"""From the signal to SageMaker's SIGKILL for the container.

"To stop a job, SageMaker sends the algorithm the SIGTERM signal, which delays job termination for
120 seconds" (API reference, StopTrainingJob).
"""
REST_IS_KILLED = 5.0
"""From a program's end to SIGKILL for what it has left running, if nobody asked it to stop."""
STDERR_IS_READ = 2.0
"""From a program's end to the last of its stderr; only a process that escaped can hold it open."""

# A host that does not come, or is lost.

HOST_APPEARS = 50.0
"""From the start of a host to the name and the answer of every other host.

SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT sets another one. AWS says that host names "might not be
immediately available" when a container starts (sagemaker/latest/dg,
your-algorithms-training-algo-running-container).
"""
LOST_HOST_ENDS_JOB = 60.0
"""From the loss of a host or a rank to the end of all ranks.

SAGEMAKER_LIGHTNING_PEER_TIMEOUT sets another one. The three functions below are its parts.
"""
HANG_ENDS_PROGRAM = 600.0
"""From the last sign of work of a host's ranks to the end of all ranks.

SAGEMAKER_LIGHTNING_HANG_TIMEOUT sets another one.
"""
ENDS_BY_ITSELF = 5.0
"""Left to something that ends by itself.

That is a launcher whose rank is dead, a connection after its last message, the watch's answer to a
rank that fails, or a name server.
"""
RESTART_KILLS = 1.0
"""From SIGTERM to SIGKILL for a program that is to be started again: it has nothing to save.

Before, its launcher gets as long to end by itself.
"""
LONGEST_PAUSE = 5.0
"""At most between two tries to reach a host."""


def silence(lost_host_ends_job: float) -> float:
    """Return after how long without a message a host counts as lost."""
    return lost_host_ends_job / 2


def ends_after_loss(lost_host_ends_job: float) -> float:
    """Return from SIGTERM to SIGKILL for a program that must end because a host is lost.

    It has nothing to save: without the lost host, no step ends any more.
    """
    return lost_host_ends_job / 6


def status_interval(silence: float) -> float:
    """Return the time between two messages of a host: some may be late before it counts as lost."""
    return min(2.0, silence / 5)


def better_reason(silence: float) -> float:
    """Return how long to wait for a better reason than the death of a rank that has said nothing.

    If a peer of that rank was lost, the peer's host knows why, and gets time to tell.
    """
    return min(3 * ENDS_BY_ITSELF, silence)


def faults_are_known(lost_host_ends_job: float) -> float:
    """Return how long a host waits until all others have said how their programs ended.

    Until then, each has noticed the loss, and ended its program.
    """
    return lost_host_ends_job


def any_reason(silence: float) -> float:
    """Return how long a host whose program failed without a reason waits to hear of one.

    That is as long as it takes to notice that a host is lost.
    """
    return silence + ENDS_BY_ITSELF
