"""resume/check/explanation.py: what is said of a difference, its kind and what has changed.

And what of a step differs (verification.py, of which the rest takes real runs).
"""

import pytest
import pytorch_lightning as pl
import torch

from sagemaker_lightning.resume.check import explanation, verification
from sagemaker_lightning.resume.check.explanation import DifferenceKind, likely_causes
from sagemaker_lightning.resume.check.journal import Step


class Fake:
    """An object with some attributes."""

    def __init__(self, **values) -> None:
        vars(self).update(values)


def trainer_of(device: str = "cpu", index: int | None = None) -> Fake:
    return Fake(strategy=Fake(root_device=torch.device(device, index)))


@pytest.mark.parametrize(
    ("kinds", "searched", "unknown"),
    [
        ([DifferenceKind.LENGTH], DifferenceKind.BATCH, "something in the data that no seed"),
        ([DifferenceKind.LOSS, DifferenceKind.BATCH], DifferenceKind.BATCH, "something in the"),
        ([DifferenceKind.LOSS, DifferenceKind.RATE], DifferenceKind.RATE, "what sets the learning"),
        ([DifferenceKind.LOSS], DifferenceKind.LOSS, "state that no checkpoint holds, or a kernel"),
    ],
)
def test_causes_are_what_has_changed_and_what_a_search_finds(monkeypatch, kinds, searched, unknown):
    monkeypatch.setattr(explanation, "_searches", [])
    assert likely_causes(None, kinds, []).startswith(unknown)
    assert likely_causes(None, kinds, ["threads"]) == "threads"
    asked = []

    def search(trainer, kind):
        asked.append((trainer, kind))
        return ["moon", "tides", "gulls"]

    for _ in range(2):
        explanation.search_by(search)
    assert likely_causes("trainer", kinds, ["threads"]) == "threads, or moon, or tides"
    assert asked == [("trainer", searched)]


CPU = "vendor_id\t: AMD\nmodel name\t: Ice; Lake: 3 GHz\nmodel name\t: another\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (CPU, "Ice, Lake: 3 GHz"),
        ("model name: " + "x" * 81, "x" * 80),
        ("vendor_id: ARM", ""),
        (None, ""),
    ],
)
def test_what_a_machine_is(monkeypatch, content, says):
    def read_text(errors):
        if content is None:
            raise FileNotFoundError
        return content

    monkeypatch.setattr(explanation, "Path", lambda path: Fake(read_text=read_text))
    assert explanation.describe_machine(trainer_of()) == (
        f"torch={torch.__version__}; Lightning={pl.__version__}; "
        f"threads={torch.get_num_threads()}; device=cpu; processor={says}"
    )


def test_a_gpu_is_described_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 {device.index}")
    trainer = trainer_of("cuda", 3)
    assert "; device=H200 3; " in explanation.describe_machine(trainer)


def test_what_has_changed_is_said_without_secrets():
    """What only one of the runs tells of has not changed."""
    flags = [("--model.x", "1", "2"), ("--model.api_key", "abc", "def")]
    before = "torch=2.1; device=cpu; old=1; same=a=b"
    now = "torch=2.2; device=cpu; new=3; same=a=c"
    assert explanation.describe_changes(flags, before, now) == [
        "--model.x, which was 1 and is 2",
        "--model.api_key, which was ****** and is ******",
        "torch, which was 2.1 and is 2.2",
        "same, which was a=b and is a=c",
    ]
    assert explanation.describe_changes([], "", now) == []


STEP = Step(step=7, epoch=1, batch=2, data=11, rates=12, loss=13)


@pytest.mark.parametrize(
    ("changed", "words", "kinds"),
    [
        ({}, "", []),
        ({"data": 5}, "the batch differs", [DifferenceKind.BATCH]),
        ({"rates": 5}, "the learning rate differs", [DifferenceKind.RATE]),
        (
            {"data": 5, "loss": 5},
            "the batch and the loss differ",
            [DifferenceKind.BATCH, DifferenceKind.LOSS],
        ),
        (
            {"epoch": 2, "batch": 0},
            "only the interrupted run had batch 2 of epoch 1 (an epoch has another length)",
            [DifferenceKind.LENGTH],
        ),
        (
            {"batch": 1},
            "the interrupted run did not have it (an epoch has another length)",
            [DifferenceKind.LENGTH],
        ),
    ],
)
def test_what_differs_in_a_step_in_words(changed, words, kinds):
    assert verification._difference(STEP, STEP._replace(**changed)) == (words, kinds)


@pytest.mark.parametrize("name", ["rates", "loss"])
def test_what_was_not_noted_does_not_differ(name):
    assert verification._difference(STEP._replace(**{name: 0}), STEP) == ("", [])
