"""The example of images in shards: which data it needs."""

import pytest
import tar_shards

from examples import image_shards

CHANNELS = ["a folder", f"s3://{tar_shards.BUCKET}"]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Serve shards in `train`."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tar_shards.write(tmp_path / tar_shards.BUCKET / "train")
    with tar_shards.on_s3(tmp_path, monkeypatch):
        yield folder


@pytest.mark.parametrize("place", CHANNELS)
@pytest.mark.parametrize("has_val", [False, True])
def test_without_images_for_it_no_epoch_is_validated(train, place, has_val):
    if has_val:
        tar_shards.write(train.parent / "val")
    data = image_shards.Images(str(train.parent) if place == "a folder" else place, num_workers=0)
    data.setup("fit")
    assert len(data.train) == 40 and bool(data.val) == has_val
    assert has_val or data.val_dataloader() == []
