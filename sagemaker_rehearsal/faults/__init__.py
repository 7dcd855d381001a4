"""Faults for the processes, the network, the disk and the checkpoints of a training.

The rehearsal uses them by rules (`--fault`) and by hand (`fault JOB`). They are useful without it,
too, to whoever tests a training of their own: nothing but Linux and the standard library is needed,
and libfaketime for a clock.

    from sagemaker_rehearsal import faults

    training = subprocess.Popen(["torchrun", "--nproc-per-node=2", "my_train.py"])
    thaw = faults.freeze(faults.find_ranks(training.pid)[1])
    ...
    thaw()

What lasts is returned as a function that ends it. Raises CannotInject where a fault is not
possible, with the reason in one line.
"""

from sagemaker_rehearsal.faults.clocks import preload_clock, shift_clock
from sagemaker_rehearsal.faults.contents import flip_bit, halve
from sagemaker_rehearsal.faults.disks import fill_disk
from sagemaker_rehearsal.faults.errors import CannotInject
from sagemaker_rehearsal.faults.networks import cut_network, lose_packets, slow_network
from sagemaker_rehearsal.faults.ranks import find_ranks, freeze, kill, slow

__all__ = [
    "CannotInject",
    "cut_network",
    "fill_disk",
    "find_ranks",
    "flip_bit",
    "freeze",
    "halve",
    "kill",
    "lose_packets",
    "preload_clock",
    "shift_clock",
    "slow",
    "slow_network",
]
