# /// script
# dependencies = ["torch-geometric==2.8.1"]
# ///
"""torch_geometric: batches of graphs, and parts of one graph that are drawn in collate_fn."""

import torch
from torch_geometric.data import Data, TemporalData
from torch_geometric.loader import (
    CachedLoader,
    DataListLoader,
    DataLoader,
    DenseDataLoader,
    DynamicBatchSampler,
    ImbalancedSampler,
    LinkLoader,
    NodeLoader,
    PrefetchLoader,
    RandomNodeLoader,
    TemporalDataLoader,
    ZipLoader,
)
from torch_geometric.sampler import BaseSampler, SamplerOutput
from torch_geometric.transforms import RandomJitter

from tests.foreign_loaders.training import BATCH_SIZE, SAMPLES, train


def graph():
    made = torch.Generator().manual_seed(1)
    edges = torch.randint(SAMPLES, (2, 6 * SAMPLES), generator=made)
    return Data(x=torch.arange(float(SAMPLES))[:, None], edge_index=edges)


class Graphs(torch.utils.data.Dataset):
    """Graphs of one to four nodes, each moved at random."""

    def __init__(self, fixed=0):
        self.move = RandomJitter(0.1)
        self.fixed = fixed

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        nodes = self.fixed or 1 + index % 4
        edges = torch.zeros(2, 1, dtype=torch.long)
        data = Data(pos=torch.full((nodes, 2), float(index)), edge_index=edges)
        data.y = torch.tensor([index % 3])
        if self.fixed:
            data.adj = torch.eye(nodes)
        return self.move(data)


class Neighbors(BaseSampler):
    """Draws three edges of each node, as NeighborLoader's sampler, which has no wheel for this."""

    def __init__(self, data):
        self.edges = data.edge_index

    def sample_from_nodes(self, index, **kwargs):
        return self._drawn(index.node, index.input_id)

    def sample_from_edges(self, index, neg_sampling=None):
        drawn = self._drawn(torch.cat([index.row, index.col]).unique(), index.input_id)
        drawn.metadata = (index.input_id, torch.stack([index.row, index.col]), None, None)
        return drawn

    def _drawn(self, seeds, input_id):
        kept = torch.randint(self.edges.shape[1], (3 * len(seeds),))
        row, col = self.edges[:, kept]
        node, places = torch.cat([seeds, row, col]).unique(return_inverse=True)
        row, col = places[len(seeds) :].view(2, -1)
        return SamplerOutput(node=node, row=row, col=col, edge=kept, metadata=(input_id, None))


def temporal(num_workers, persistent_workers):
    size = SAMPLES
    data = TemporalData(
        src=torch.arange(size),
        dst=torch.arange(size),
        t=torch.arange(size),
        msg=torch.ones(size, 1),
    )
    return TemporalDataLoader(data, BATCH_SIZE, num_workers=num_workers)


def nodes(**workers):
    data = graph()
    return NodeLoader(data, Neighbors(data), batch_size=BATCH_SIZE, shuffle=True, **workers)


LOADERS = {
    "DataLoader": lambda **workers: DataLoader(Graphs(), BATCH_SIZE, shuffle=True, **workers),
    "DataLoader, DynamicBatchSampler": lambda **workers: DataLoader(
        Graphs(),
        batch_sampler=DynamicBatchSampler(Graphs(), 12, shuffle=True, num_steps=8),
        **workers,
    ),
    "DataLoader, ImbalancedSampler": lambda **workers: DataLoader(
        Graphs(),
        BATCH_SIZE,
        sampler=ImbalancedSampler(torch.arange(SAMPLES) % 3),
        **workers,
    ),
    "DataListLoader": lambda **workers: DataListLoader(
        Graphs(), BATCH_SIZE, shuffle=True, **workers
    ),
    "DenseDataLoader": lambda **workers: DenseDataLoader(
        Graphs(3), BATCH_SIZE, shuffle=True, **workers
    ),
    "NodeLoader (draws in collate_fn)": nodes,
    "LinkLoader (draws in collate_fn)": lambda **workers: LinkLoader(
        graph(),
        Neighbors(graph()),
        edge_label_index=graph().edge_index[:, :SAMPLES],
        batch_size=BATCH_SIZE,
        shuffle=True,
        **workers,
    ),
    "RandomNodeLoader": lambda **workers: RandomNodeLoader(graph(), 10, shuffle=True, **workers),
    "TemporalDataLoader": temporal,
    "ZipLoader": lambda **workers: ZipLoader(
        [nodes(), nodes()], batch_size=BATCH_SIZE, shuffle=True, **workers
    ),
    "PrefetchLoader": lambda **workers: PrefetchLoader(nodes(**workers), torch.device("cpu")),
    "CachedLoader": lambda **workers: CachedLoader(nodes(**workers)),
}


def numbers(batch):
    if isinstance(batch, (list, tuple)):
        return torch.cat([numbers(part) for part in batch])
    if isinstance(batch, TemporalData):
        return torch.cat([batch.src[:, None].float(), batch.msg], 1)[:, :2]
    if batch.x is not None:
        return torch.cat([batch.x, batch.x * batch.edge_index.sum()], 1)
    return batch.pos.reshape(-1, 2)


if __name__ == "__main__":
    train(LOADERS, numbers)
