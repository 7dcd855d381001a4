# /// script
# dependencies = ["timm==1.0.31"]
# ///
"""timm's create_loader: it wraps a DataLoader, or keeps one iterator for all epochs."""

import torch
from timm.data import FastCollateMixup, create_loader
from timm.data.loader import MultiEpochsDataLoader
from torch.utils.data import DataLoader, Dataset

from tests.foreign_loaders.training import SAMPLES, sample, train


class Images(Dataset):
    """Its items are images, uint8 [3, 8, 8], and labels; a timm transform makes arrays of them."""

    def __init__(self):
        self.transform = None

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        from PIL import Image

        level, noise = sample(index).tolist()
        image = Image.new("RGB", (12, 12), (int(5 * level), int(60 * noise), int(level)))
        return (self.transform(image) if self.transform else image), index


def of_timm(**more):
    def make(num_workers, persistent_workers):
        return create_loader(
            Images(),
            (3, 8, 8),
            4,
            is_training=True,
            num_workers=num_workers,
            persistent_workers=persistent_workers,
            device=torch.device("cpu"),
            **more,
        )

    return make


def samples(dataset_class=DataLoader, **options):
    return lambda **workers: dataset_class(
        [sample(number) for number in range(SAMPLES)], 4, shuffle=True, **options, **workers
    )


LOADERS = {
    "create_loader (PrefetchLoader)": of_timm(),
    "create_loader, random erasing": of_timm(re_prob=0.5, re_mode="pixel"),
    "create_loader, use_prefetcher=False": of_timm(use_prefetcher=False),
    "create_loader, mixup in collate": of_timm(
        collate_fn=FastCollateMixup(mixup_alpha=0.8, num_classes=SAMPLES)
    ),
    "MultiEpochsDataLoader": samples(MultiEpochsDataLoader),
    "create_loader, use_multi_epochs_loader": of_timm(use_multi_epochs_loader=True),
}


def numbers(batch):
    if isinstance(batch, torch.Tensor):
        return batch
    images, labels = batch
    labels = labels.float().reshape(len(labels), -1).sum(dim=1)
    sums = images.float().flatten(1).sum(dim=1)
    if len(labels) != len(sums):
        labels = sums
    return torch.stack([labels, sums], 1)


if __name__ == "__main__":
    train(LOADERS, numbers)
