"""Short trainings of Lightning's own model, without ExactResume."""

import pytorch_lightning


def fit(model: pytorch_lightning.LightningModule, callback: pytorch_lightning.Callback, **options):
    """Train for one epoch of four batches, and return the trainer."""
    trainer = pytorch_lightning.Trainer(
        **{"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0} | options,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return trainer
