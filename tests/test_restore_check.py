"""resume/check/restore_check.py: which values of a checkpoint are compared, and by which names."""

from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback

from sagemaker_lightning.resume.check import restore_check
from sagemaker_lightning.resume.check.restore_check import differing, fingerprint
from sagemaker_lightning.state.graph.encoding import encode
from sagemaker_lightning.state.graph.start import Start


def held(**values) -> dict:
    """Return the state of a user's objects."""
    empty = {"unsaved": {}, "generators": {}, "stateful": {}, "settings": {}, "modules": {}}
    return empty | {"graph": graph(), "eval": [], "frozen": []} | values


def graph(**values) -> dict:
    """Return the record of a model that has got these attributes."""
    model = SimpleNamespace()
    start = Start({"model": model})
    vars(model).update(values)
    record, _ = encode({"model": model}, start)
    return record


def names(state=(), held_=None, **rank_state) -> set[str]:
    whole = {"optimizer_states": [], "lr_schedulers": []} | dict(state)
    of_rank = {"buffers": {}, "metrics": {}, "parts": {}, "held": held_ or held()}
    return set(fingerprint(whole, of_rank | rank_state))


ONE = torch.ones(1)


def test_what_lightning_saves_is_compared():
    """Of a buffer that is this rank's own, the rank's; of callbacks, what comes of training."""
    assert names(
        {
            "state_dict": {"body.weight": ONE, "norm.mean": ONE},
            "current_model_state": {"weight": ONE},
            "averaging_state": {"n": ONE},
            "optimizer_states": [{"state": {0: {"step": ONE}}, "param_groups": [{"lr": 0.1}]}],
            "lr_schedulers": [{"last_epoch": 3}],
            "callbacks": {
                "Saves": {
                    "best_model_score": ONE,
                    "best_k_models": {"/a/b/best.ckpt": ONE, "/a/c.ckpt": torch.tensor(1)},
                    "dirpath": "/a/b",
                    "wait_count": 3,
                    "count": torch.tensor(3),
                }
            },
        },
        buffers={"model.norm.mean": ONE},
        metrics={"model.mean": {"value": (ONE, 3)}},
    ) == {
        "state_dict.body.weight",
        "current_model_state.weight",
        "averaging_state.n",
        "optimizer_states.0.state.0.step",
        "optimizer_states.0.param_groups.0.lr",
        "lr_schedulers.0.last_epoch",
        "callbacks.Saves.best_model_score",
        "callbacks.Saves.best_k_models.best.ckpt",
        "buffers.model.norm.mean",
        "metrics.model.mean.value.0",
        "metrics.model.mean.value.1",
    }


def test_what_a_users_objects_hold_is_compared():
    assert names(
        held_=held(
            graph=graph(count=3),
            unsaved={"model.file": "_io.StringIO"},
            generators={"model.rng": 3},
            stateful={"model.inner": 3},
            settings={"limit": 3},
            modules={"the class of model": "Linear 0"},
            data={"the length of train.0.dataset": 3},
            eval=["", "body"],
            frozen=["body.weight"],
        )
    ) == {
        "model.count",
        "model.file",
        "generators model.rng",
        "stateful model.inner",
        "settings limit",
        "the class of model",
        "the length of train.0.dataset",
        "eval model",
        "eval body",
        "frozen body.weight",
    }


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [(3, 3, True), (3, 4, False), ({1, 2, 3}, {3, 2, 1}, True), ([1, 2], [2, 1], False)],
)
def test_equal_values_have_equal_digests(first, second, same):
    digests = [
        fingerprint(
            {"optimizer_states": [], "lr_schedulers": []},
            {
                "parts": {},
                "buffers": {},
                "metrics": {},
                "held": held(graph=graph(x=value)),
            },
        )
        for value in (first, second)
    ]
    assert (digests[0] == digests[1]) is same
    assert differing(*digests) == ([] if same else ["model.x"])


def test_what_is_missing_or_another_one_differs():
    """A model may have more or fewer weights; a mode or a frozen weight may not come to it."""
    before = {"a": 1, "b": 2, "c": 1, "state_dict.w": 4, "averaging_state.n": 5, "eval body": 6}
    now = {"a": 1, "b": 9, "new": 3, "eval head": 4, "frozen body": 5, "state_dict.v": 6}
    assert differing(before, now) == ["b", "c", "eval body", "eval head", "frozen body"]
    assert differing({"state_dict.w": 4}, {"state_dict.w": 5}) == ["state_dict.w"]
    assert differing({"eval body": 6}, {"eval body": 6}) == []


class Counts(Callback):
    """Counts how often it saves."""

    saved = 0

    def state_dict(self):
        return {"x": 1}

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved += 1


class OfLightning(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["saved"] = trainer, pl_module


OfLightning.on_save_checkpoint.__module__ = "pytorch_lightning.callbacks.mine"


def test_a_users_code_is_not_asked_to_save_for_the_comparison():
    counts = Counts()
    strategy = SimpleNamespace(
        lightning_module_state_dict=lambda: {"w": 1}, optimizer_state=lambda optimizer: [optimizer]
    )
    scheduler = SimpleNamespace(state_dict=lambda: {"last_epoch": 3})
    trainer = SimpleNamespace(
        lightning_module="the model",
        strategy=strategy,
        optimizers=["a", "b"],
        lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)],
        callbacks=[counts, OfLightning()],
    )
    assert restore_check.present_state(trainer) == {
        "state_dict": {"w": 1},
        "optimizer_states": [["a"], ["b"]],
        "lr_schedulers": [{"last_epoch": 3}],
        "callbacks": {"Counts": {"x": 1}, "OfLightning": {}},
        "saved": (trainer, "the model"),
    }
    assert counts.saved == 0
