"""A model that is written slowly, as a large one is.

It takes five seconds after training, on the one host that writes it.
"""

import time

from torch import nn

from app.model import ResNet18


class SlowlyWritten(nn.Sequential):
    def state_dict(self, *args, **kwargs):
        if not kwargs:  # asked directly, for export; a checkpoint asks its module
            time.sleep(5)
        return super().state_dict(*args, **kwargs)


class Model(ResNet18):
    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.network = SlowlyWritten(self.network)
