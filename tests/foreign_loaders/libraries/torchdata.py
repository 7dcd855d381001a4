# /// script
# dependencies = ["torchdata==0.11.0"]
# ///
"""torchdata: its StatefulDataLoader, and loaders made of nodes."""

import torch
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.foreign_loaders.training import BATCH_SIZE, SAMPLES, sample, train


class Table(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return sample(index)


class Stream(IterableDataset):
    """A stream that workers share; its iterator saves nothing."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from map(sample, range(first, SAMPLES, step))


class StreamWithState(Stream):
    """The same; it saves where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        numbers = range(first, SAMPLES, step)
        while self.at < len(numbers):
            self.at += 1
            yield sample(numbers[self.at - 1])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def in_nodes(parallel="", prefetch=0, mixed=False):
    def make(num_workers, persistent_workers):
        def samples(size):
            return nodes.SamplerWrapper(RandomSampler(range(size)))

        node = (
            nodes.MultiNodeWeightedSampler(
                {"a": samples(24), "b": samples(16)}, {"a": 0.6, "b": 0.4}, seed=3
            )
            if mixed
            else samples(SAMPLES)
        )
        if parallel and num_workers:
            node = nodes.ParallelMapper(node, sample, num_workers=num_workers, method=parallel)
        else:
            node = nodes.Mapper(node, sample)
        node = nodes.Mapper(nodes.Batcher(node, BATCH_SIZE), torch.stack)
        if prefetch:
            node = nodes.Prefetcher(node, prefetch_factor=prefetch)
        return nodes.Loader(node)

    return make


LOADERS = {
    "StatefulDataLoader, table": lambda **workers: StatefulDataLoader(
        Table(), BATCH_SIZE, shuffle=True, **workers
    ),
    "StatefulDataLoader, stream": lambda **workers: StatefulDataLoader(
        Stream(), BATCH_SIZE, **workers
    ),
    "StatefulDataLoader, stream with a state": lambda **workers: StatefulDataLoader(
        StreamWithState(), BATCH_SIZE, **workers
    ),
    "nodes, Mapper": in_nodes(),
    "nodes, ParallelMapper in threads": in_nodes("thread"),
    "nodes, ParallelMapper in processes": in_nodes("process"),
    "nodes, Prefetcher": in_nodes(prefetch=2),
    "nodes, MultiNodeWeightedSampler": in_nodes(mixed=True),
}

if __name__ == "__main__":
    train(LOADERS)
