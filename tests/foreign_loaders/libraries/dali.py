# /// script
# dependencies = ["nvidia-dali-cuda120==2.4.0"]
# ///
"""DALI on a CPU: a pipeline with operators that draw, by its iterator for PyTorch."""

from pathlib import Path

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from tests.foreign_loaders.training import BATCH_SIZE, SAMPLES, train


def write():
    Path("files").mkdir(exist_ok=True)
    for number in range(SAMPLES):
        np.save(f"files/{number:03}.npy", np.array([number], dtype=np.float32))


def loader(shuffle, draws):
    def make(num_workers, persistent_workers):
        write()

        @pipeline_def(
            batch_size=BATCH_SIZE, num_threads=max(1, num_workers), device_id=None, seed=7
        )
        def of_files():
            numbers = fn.readers.numpy(
                file_root="files", file_filter="*.npy", random_shuffle=shuffle, name="reader"
            )
            noise = fn.random.uniform(range=(0.0, 1.0), dtype=types.FLOAT) if draws else 0.5
            return fn.cat(numbers, numbers * 0.0 + noise)

        return DALIGenericIterator(
            of_files(),
            ["x"],
            reader_name="reader",
            auto_reset=True,
            last_batch_policy=LastBatchPolicy.DROP,
        )

    return make


LOADERS = {
    "DALIGenericIterator, in order": loader(shuffle=False, draws=False),
    "DALIGenericIterator, shuffled": loader(shuffle=True, draws=False),
    "DALIGenericIterator, shuffled, draws": loader(shuffle=True, draws=True),
}

if __name__ == "__main__":
    train(LOADERS, lambda batch: torch.as_tensor(batch[0]["x"]))
