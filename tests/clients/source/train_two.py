"""A job's own program that trains as the image does, in two processes on each host.

Another program has started the processes.
"""

from app.train_multi_node import main

SHORT = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.enable_checkpointing=false",
]
main([*SHORT, "--trainer.devices=2", "--trainer.accelerator=cpu", "--data.batch_size=64"])
