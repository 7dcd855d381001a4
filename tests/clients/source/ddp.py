"""Plain PyTorch on several hosts, as in its own tutorials.

It knows nothing of Lightning or SageMaker.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    loss = model(torch.full((1, 2), float(dist.get_rank()))).sum()
    loss.backward()
    gradient = model.module.weight.grad[0, 0].item()  # the mean of the ranks
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: gradient {gradient}, given "
        f"{sys.argv[1:]}",
        flush=True,
    )
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{os.environ['SM_MODEL_DIR']}/model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # In a function: a model that still exists while Python ends holds gloo's threads. One of them
    # may then need what is gone, and abort (PyTorch pull request 179291; seen once here, on busy
    # cores).
    main()
