"""compat/torch_data.py: copies of a loader, and its workers."""

import threading
import types

from torch.utils.data import DataLoader

from sagemaker_lightning.compat import torch_data


def test_a_loader_is_copied_without_its_workers():
    numbers = [1, 2]
    loader = DataLoader(numbers, num_workers=1, persistent_workers=True, timeout=5)
    iterator = iter(loader)
    copied = torch_data.copied(loader)
    assert [batch.item() for batch in copied] == [1, 2]
    assert copied.dataset == numbers and copied.dataset is not numbers
    assert torch_data.copied(DataLoader([threading.Lock()])) is None
    torch_data.end_workers(loader)
    del iterator


def test_workers_end_with_their_loader():
    ended = []
    loader = types.SimpleNamespace(
        _iterator=types.SimpleNamespace(_shutdown_workers=lambda: ended.append(1))
    )
    assert torch_data.has_iterator(loader)
    for _ in range(2):
        torch_data.end_workers(loader)
    torch_data.end_workers(object())
    assert ended == [1] and not torch_data.has_iterator(loader) and loader._iterator is None
