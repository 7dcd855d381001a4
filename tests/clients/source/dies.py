"""A job's own program that trains as the image does, and of which a rank is killed once."""

import os
import signal
from pathlib import Path

from pytorch_lightning import Callback

from app.train_multi_node import main


class Dies(Callback):
    """Kills the last rank at the end of its third batch, the first time."""

    def on_train_batch_end(self, trainer, *_) -> None:
        """Kill it."""
        died = Path("/tmp/died")
        is_last = trainer.global_rank == trainer.world_size - 1
        if is_last and trainer.global_step == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(
        [
            "--trainer.callbacks+=dies.Dies",
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=5",
            "--trainer.devices=2",
            "--trainer.accelerator=cpu",
            "--data.batch_size=16",
        ]
    )
