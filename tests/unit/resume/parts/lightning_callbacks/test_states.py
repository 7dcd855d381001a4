"""A resume compares what training has changed in the callbacks' states."""

import torch
from pytorch_lightning import Callback
from untrained import in_epoch_5, run_of

from sagemaker_lightning.resume.parts.lightning_callbacks.states import Callbacks


class Counts(Callback):
    def state_dict(self):
        return {"x": 1}


def test_scores_are_compared_and_no_paths_and_counts():
    one = torch.ones(1)
    part = run_of(in_epoch_5(callbacks=[Counts()])).part(Callbacks)
    assert part.present() == {"callbacks": {"Counts": {"x": 1}}}
    saved = {
        "best_model_score": one,
        "best_k_models": {"/a/b/best.ckpt": one, "/a/c.ckpt": torch.tensor(1)},
        "dirpath": "/a/b",
        "wait_count": 3,
        "count": torch.tensor(3),
    }
    assert part.digest({"callbacks": {"Saves": saved}}, {}).keys() == {
        "callbacks.Saves.best_model_score",
        "callbacks.Saves.best_k_models.best.ckpt",
    }
    assert part.digest({}, {}) == {}
