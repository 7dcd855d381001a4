"""Users' own loaders, streams and stateful datasets, interrupted and resumed.

A stopped run ends with the weights of an uninterrupted one.
"""

import re

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
CASES = {
    "buffered": data("buffered"),
    "buffered, workers": data("buffered", TWO_WORKERS),
    "unseeded": data("unseeded"),
    "unseeded, workers": data("unseeded", TWO_WORKERS),
    "counted": data("counted"),
    "sized, rate": [*data("sized"), "--model=streams.Estimated"],
    "sized, rate, workers": [*data("sized", TWO_WORKERS), "--model=streams.Estimated"],
    "stateful stream": data("resumable", STATEFUL),
    "stateful stream, workers": data("resumable", STATEFUL, TWO_WORKERS),
    "stateful stream, workers that stay": data("resumable", STATEFUL, TWO_WORKERS, PERSISTENT),
    "stateful stream, few snapshots": data("resumable", STATEFUL, TWO_WORKERS, "every=4"),
    "stateful iterator": data("walked", STATEFUL),
    "stateful iterator, workers": data("walked", STATEFUL, TWO_WORKERS),
    "stateful loader, buffered": data("buffered", STATEFUL),
    "stateful loader, buffered, workers": data("buffered", STATEFUL, TWO_WORKERS),
    "stateful dataset": data("remembered", STATEFUL),
    "stateful dataset, workers": data("remembered", STATEFUL, TWO_WORKERS),
    "stateful dataset, workers that stay": data("remembered", STATEFUL, TWO_WORKERS, PERSISTENT),
    "stateful stream, short epochs": [
        *data("resumable", STATEFUL, TWO_WORKERS),
        "--trainer.limit_train_batches=7",
    ],
    "stateful dataset, short epochs": [
        *data("remembered", STATEFUL),
        "--trainer.limit_train_batches=7",
    ],
    "litdata": ["--data=streams.Streamed"],
    "litdata, workers": ["--data=streams.Streamed", "--data.workers=2"],
    "litdata, short epochs": [
        "--data=streams.Streamed",
        "--data.workers=2",
        "--trainer.limit_train_batches=7",
    ],
    "litdata, two datasets": ["--data=streams.Mixed", "--data.workers=2"],
    "litdata, two datasets by weights": ["--data=streams.Mixed", "--data.kind=weights"],
    "litdata, two datasets by batches": [
        "--data=streams.Mixed",
        "--data.kind=batches",
        "--data.workers=1",
    ],
    "litdata, two datasets in parallel": [
        "--data=streams.Mixed",
        "--data.kind=parallel",
        "--data.workers=2",
    ],
    "litdata, two datasets, ranks": ["--data=streams.Mixed", "--data.workers=2", *TWO_RANKS],
    "shards": data("sharded"),
    "shards, workers": data("sharded", TWO_WORKERS),
    "shards, ranks": [*data("sharded", TWO_WORKERS), *TWO_RANKS],
    "a loader of its own": data("steady"),
    "a loader that keeps its state": data("keeping"),
    "a loader that forgets its epoch": data("forgetful"),
    "list": [*data("points+counted"), "--model=streams.Both"],
    "min_size": [
        *data("points+buffered", "mode=min_size"),
        "--model=streams.Both",
        "--trainer.max_epochs=8",
    ],
    "max_size": [
        *data("counted+points+steady", "mode=max_size", TWO_WORKERS),
        "--model=streams.Both",
    ],
    "max_size_cycle": [
        *data("points+counted+buffered", "mode=max_size_cycle"),
        "--model=streams.Both",
    ],
    "dict of states": data("resumable+remembered", "mode=dict", STATEFUL, TWO_WORKERS),
    "dict of a state and none": data("keeping+points", "mode=dict"),
    "min_size of states": [
        *data("resumable+walked", "mode=min_size", STATEFUL, TWO_WORKERS),
        "--model=streams.Both",
        "--trainer.max_epochs=8",
    ],
    "max_size of states": [
        *data("remembered+resumable+keeping", "mode=max_size", STATEFUL),
        "--model=streams.Both",
    ],
    "max_size_cycle of states": [
        *data("points+keeping+resumable", "mode=max_size_cycle", STATEFUL),
        "--model=streams.Both",
    ],
    "cycle of states": [*data("points+resumable", STATEFUL, TWO_WORKERS), "--model=streams.Both"],
    "lazy": data("lazy"),
    "lazy, workers": data("lazy", TWO_WORKERS),
    "lazy, workers that stay": data("lazy", TWO_WORKERS, PERSISTENT),
    "lazy without seed": data("lazy without seed"),
    "lazy without seed, workers": data("lazy without seed", TWO_WORKERS),
    "lazy random, workers": data("lazy random", TWO_WORKERS),
    "late": data("late", TWO_WORKERS, PERSISTENT),
    "local": data("local"),
    "local, workers": data("local", TWO_WORKERS),
    "lazy collate": data("points", "collate=true", TWO_WORKERS),
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
    "a dataset that hides where it is": data("hidden"),
    "a dataset that hides where it is, workers": data("hidden", TWO_WORKERS),
    "buffered, ranks": [*data("buffered", TWO_WORKERS), *TWO_RANKS],
    "stateful stream, ranks": [*data("resumable", STATEFUL, TWO_WORKERS), *TWO_RANKS],
    "litdata, ranks": ["--data=streams.Streamed", "--data.workers=2", *TWO_RANKS],
    "a long list": [*data("ordered"), "--trainer.callbacks=streams.Shuffling"],
    "generator, short epochs": [*data("generator"), "--trainer.limit_train_batches=4"],
}
# unit/data/loaders has "litdata, workers" (test_stateful.py) and "lazy, workers" (test_several.py)
# in one process.
ALWAYS_RUN = [
    "buffered, workers",
    "stateful stream, workers",
    "cycle of states",
    "curriculum by steps, workers that stay",
    "dataloader_iter, two a step",
    "replay, live",
]


LAST_STEP = {
    "unseeded, workers": 19,
    "max_size": 19,
    "dataloader_iter, two a step": 4,
    "litdata, ranks": 4,
    "generator, short epochs": 3,
    "a dataset that hides where it is": 4,
}
"""The last batches of epochs, where it is not the tenth; short epochs have 7."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ALWAYS_RUN else pytest.mark.soak) for case in CASES],
)
def test_exact(tmp_path, case):
    last_step = LAST_STEP.get(case, 6 if "short epochs" in case else 9)
    check(
        tmp_path,
        *CASES[case],
        at=("2:2", "5:1") if "min_size" in case else (f"1:{last_step}", "2:1"),
    )


def test_what_cannot_be_drawn_again_is_resumed_at_epochs_ends(tmp_path):
    run = Run(tmp_path, *data("unsteady"), "--resume.every_n_steps=1")
    assert run.start(STOP_AT="1:3") == 143
    warning = "streams.Unsteady draws other batches each time"
    assert (
        run.output.count(
            f"{warning}: checkpoints are saved only at the end of an epoch, and a stopped run goes "
            "back to the last one\n"
        )
        == 1
    )
    assert (
        f"step-000000010.ckpt is complete; {warning}, so the run goes back to the end of an epoch"
        in run.output
    )
    assert [path.name for path in tmp_path.rglob("step-*.ckpt")] == ["step-000000010.ckpt"]
    run.finish()
    assert "resuming from step 10:" in run.output


def steps(run: Run) -> int:
    """Return the number of the last step."""
    return max(int(path.stem.removeprefix("step-")) for path in run.folder.rglob("step-*.ckpt"))


@pytest.mark.parametrize(
    "ranks", [[], pytest.param(TWO_RANKS, marks=pytest.mark.soak)], ids=["one rank", "two ranks"]
)
def test_what_a_stream_has_given_is_left_out(tmp_path, ranks):
    """Batches that a stream has already given are drawn again and skipped.

    A line says how long it took. The epoch keeps its length, although nothing tells the length.
    """
    flags = [*data("sharded", TWO_WORKERS), *ranks]
    alone = Run(tmp_path / "alone", *flags)
    run = Run(tmp_path / "run", *flags)
    alone.finish()
    assert run.start(STOP_AT="1:3") == 143
    run.finish()
    assert steps(run) == steps(alone) == (18 if ranks else 30)
    warning = (
        r"^the training data cannot start at a batch \(streams\.Sharded\): the 4 batches before "
        r"this one were drawn again, in "
    )
    assert len(re.findall(rf"{warning}\d+\.\d s$", run.output, re.M)) == 1, run.output


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


def test_what_workers_change_is_said(tmp_path):
    run = Run(tmp_path, *data("growing", TWO_WORKERS), "--trainer.max_epochs=2")
    run.finish()
    assert (
        run.output.count("Growing.seen changes in the data workers, where no checkpoint saves it")
        == 1
    )
    run = Run(
        tmp_path / "without",
        *data("points", TWO_WORKERS),
        "--data.dataset=buffered",
        "--trainer.max_epochs=2",
    )
    run.finish()
    assert "changes in the data workers" not in run.output


def test_another_number_of_workers_cannot_continue_with_their_state(tmp_path):
    run = Run(tmp_path, *data("resumable", STATEFUL, TWO_WORKERS))
    assert run.start(STOP_AT="1:3") == 143
    run.flags.append("--data.workers=1")
    assert run.start() == 1
    assert (
        "error: --data: streams.Resumable saved its state with 2 data workers, now there are "
        "1; continue" in run.output
    )
