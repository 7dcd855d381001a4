"""How far a training has come, for watchers outside, and what its restarts have cost."""

from pytorch_lightning import Trainer

from sagemaker_lightning.compat.lightning_loops import steps_done
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.contract.restart import ContainerRestart
from sagemaker_lightning.nodes.rank_progress import ProgressFile


class ContainerRestarts:
    """The restarts of this program in its container, and the progress of its newest training.

    Args:
        environment: Has the restarts, and where the watch reads the progress.
    """

    def __init__(self, environment: SageMakerEnvironment) -> None:
        self.environment = environment
        self.progress = ProgressFile(environment.watch)

    def ranks_are_there(self, trainer: Trainer) -> None:
        """Note how many ranks this host has; all of them have begun."""
        self.progress.note_ranks(trainer.world_size // trainer.num_nodes)

    def training_begins(self, trainer: Trainer) -> None:
        """Note that a training begins, with an optimizer step."""
        self.progress = ProgressFile(self.environment.watch, self.progress.ranks)
        self.progress.begin(steps_done(trainer))

    def moves(self, trainer: Trainer) -> None:
        """Note that this rank continues."""
        self.progress.move(steps_done(trainer))

    def batch_ended(self, trainer: Trainer) -> None:
        """Note that a batch is done; after a restart, print once what it has cost."""
        is_first = not self.progress.first_step_at
        self.progress.batch_ended(steps_done(trainer))
        if is_first and self.environment.restarts and trainer.is_global_zero:
            newest = self.all()[-1]
            lost = "" if newest.lost_steps is None else f", {newest.lost_steps} steps lost"
            log.info(
                f"restart {len(self.environment.restarts)}: continued from step "
                f"{newest.resumed_step} after {newest.seconds:.1f} s{lost}"
            )

    def training_ends(self, trainer: Trainer) -> None:
        """Note that the training has ended."""
        self.progress.end(steps_done(trainer))

    def training_fails(self, error: BaseException) -> None:
        """Note that an error has left the training: whoever catches it knows that it has not ended.

        A program that ends by sys.exit(0) within its training does not say so.
        """
        if not (isinstance(error, SystemExit) and error.code in (0, None)):
            self.progress.fail()

    def all(self) -> list[ContainerRestart]:
        """Return the restarts; the newest with what it has cost."""
        restarts = list(self.environment.restarts)
        if restarts and self.progress.first_step_at:
            first_step_at = self.progress.first_step_at / 1e9
            restarts[-1] = restarts[-1].continued(self.progress.began_with, first_step_at)
        return restarts
