"""Users' own loaders, streams and stateful datasets, interrupted and resumed.

A stopped run ends with the weights of an uninterrupted one.
"""

import pytest
from test_strangers import Run, check

pytestmark = pytest.mark.slow

DATA_FLAG = "--data=streams.Data"


def data(dataset: str = "points", *options: str) -> list[str]:
    return [DATA_FLAG, f"--data.dataset={dataset}", *(f"--data.{option}" for option in options)]


TWO_WORKERS = "workers=2"
PERSISTENT = "persistent=true"
STATEFUL = "stateful=true"
TWO_RANKS = ["--trainer.devices=2", "--trainer.strategy=ddp"]
AGENT_FLAGS = ["--model=streams.Agent", "--data=streams.OfModel"]
# unit/data/loaders/test_several.py has more kinds of loaders, and the zoo more trainings.
CASES = {
    "buffered, workers": data("buffered", TWO_WORKERS),
    "buffered, ranks": [*data("buffered", TWO_WORKERS), *TWO_RANKS],
    "sized, rate, workers": [*data("sized", TWO_WORKERS), "--model=streams.Estimated"],
    "stateful stream, workers": data("resumable", STATEFUL, TWO_WORKERS),
    "stateful stream, ranks": [*data("resumable", STATEFUL, TWO_WORKERS), *TWO_RANKS],
    "litdata, ranks": ["--data=streams.Streamed", "--data.workers=2", *TWO_RANKS],
    "litdata, two datasets, ranks": ["--data=streams.Mixed", "--data.workers=2", *TWO_RANKS],
    "shards, ranks": [*data("sharded", TWO_WORKERS), *TWO_RANKS],
    "cycle of states": [*data("points+resumable", STATEFUL, TWO_WORKERS), "--model=streams.Both"],
    "worker_init_fn": data("points", "init=true", TWO_WORKERS),
    "flagged": data("flagged"),
    "curriculum by steps": [*data("points", TWO_WORKERS), "--trainer.callbacks=streams.Steps"],
    "curriculum by steps, workers that stay": [
        *data("points", TWO_WORKERS, PERSISTENT),
        "--trainer.callbacks=streams.Steps",
    ],
    "curriculum of a stream": [*data("buffered", TWO_WORKERS), "--trainer.callbacks=streams.Steps"],
    "dataloader_iter": ["--model=streams.Drawing", *data()],
    "dataloader_iter, two a step": [
        "--model=streams.Drawing",
        "--model.each=2",
        *data("points", TWO_WORKERS),
    ],
    "dataloader_iter, ahead": ["--model=streams.Ahead", *data()],
    "replay": AGENT_FLAGS,
    "replay, live": [*AGENT_FLAGS, "--model.live=true"],
    "replay of objects": [*AGENT_FLAGS, "--model.objects=true"],
    "replay of 100,000": [*AGENT_FLAGS, "--model.size=100000"],
    "reloaded": [*data("counted"), "--trainer.reload_dataloaders_every_n_epochs=1"],
    "reloaded, workers that stay": [
        *data("resumable", STATEFUL, TWO_WORKERS, PERSISTENT),
        "--trainer.reload_dataloaders_every_n_epochs=1",
    ],
    "a long list": [*data("ordered"), "--trainer.callbacks=streams.Shuffling"],
}
ALWAYS_RUN = [
    "stateful stream, workers",
    "replay, live",
]
LAST_STEP = {"dataloader_iter, two a step": 4, "litdata, ranks": 4}
"""The last batches of epochs, where it is not the tenth."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ALWAYS_RUN else pytest.mark.soak) for case in CASES],
)
def test_exact(tmp_path, case):
    last_step = LAST_STEP.get(case, 9)
    check(tmp_path, *CASES[case], at=(f"1:{last_step}", "2:1"))


OTHER_STREAMS = [
    "dated",
    pytest.param("measured", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("name", OTHER_STREAMS)
def test_a_stream_that_is_another_one_is_reported(tmp_path, name):
    """A stream that differs is reported.

    Drawn twice in a process its first batch is the same; the checkpoint has the batch after it.
    """
    run = Run(tmp_path, *data(name))
    assert run.start(STOP_AT="1:3") == 143
    warning = (
        "resumed at step 14: step 16 is not that of the interrupted run: on rank 0, the batch "
        "differs; likely"
    )
    assert run.start("--resume.strict=true") == 1
    assert f"\nerror: --resume.strict: {warning} " in run.output
    run.finish()
    assert f"\nwarning: {warning} " in run.output
