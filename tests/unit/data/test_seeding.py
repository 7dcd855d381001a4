"""data/seeding.py: what a run draws by, and that it leaves the process as it was."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from sagemaker_lightning.data.seeding import Seeding


@pytest.mark.parametrize("ends", ["on_exception", "teardown"])
def test_a_run_that_ends_or_fails_leaves_the_process_as_it_was(ends):
    undone = []
    seeding = Seeding(7)
    seeding.changed.callback(undone.append, "entropy")
    getattr(seeding, ends)(None, None, "validate")
    assert undone == ["entropy"]


class Model(pl.LightningModule):
    """Notes the samples that it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batch_size = 4
        self.samples = []

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(64.0)[:, None]), self.batch_size, shuffle=True)

    def training_step(self, batch, batch_idx):
        self.samples += batch[0].flatten().tolist()
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


@pytest.mark.parametrize("searches", [True, False])
def test_a_search_before_training_changes_no_order(tmp_path, searches):
    model = Model()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "default_root_dir": tmp_path, "accelerator": "cpu"}
    trainer = pl.Trainer(callbacks=[Seeding(7)], max_epochs=1, **quiet)
    if searches:
        Tuner(trainer).scale_batch_size(model, max_trials=2, init_val=2, steps_per_trial=1)
    model.batch_size = 4
    model.samples.clear()
    trainer.fit(model)
    assert model.samples[:4] == [29, 21, 30, 36]
