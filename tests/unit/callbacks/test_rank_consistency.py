"""callbacks/rank_consistency.py: N ranks compute what one process would, and agree."""

import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import ranks
import torch
from consistent_ranks import SHORT, fit_by_flags, rank_of
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.strategies import DDPStrategy

from sagemaker_lightning import GradientWeighting, LearningRateScaling, UserError
from sagemaker_lightning.callbacks import rank_consistency
from sagemaker_lightning.callbacks.gradient_weighting import share_of_batch, weight_gradients
from sagemaker_lightning.callbacks.rank_consistency import RankConsistency, refuse_contradictions
from sagemaker_lightning.cli.lightning_cli import CommandLine
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.data.deterministic import make_resumable

from app.in_memory import ResidentLoader
from app.train import APPLICATION

GLOBAL_BATCH = 12  # images
# Float32 sums in another order; without the weights the difference is 1e-2 and more.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def fit(size: int, accumulate: int = 1, weighed: bool = True, **options):
    """Train two epochs on this rank; return what the model noted, and its weights."""
    world = int(ranks.os.environ.get("WORLD_SIZE", 1))
    model = ranks.Regression()
    callbacks = [RankConsistency(SageMakerEnvironment(), {})] if weighed else []
    data = ranks.Numbered(size + 4, batch_size=GLOBAL_BATCH // world, **options)
    ranks.trainer(callbacks, accumulate_grad_batches=accumulate).fit(model, data)
    return model.seen, model.losses, model.gradients, model.weights


def as_one_process(size: int, world: int, accumulate: int = 1):
    """Return losses, gradients and weights of plain PyTorch on the global batches.

    A global batch is the batches of all ranks, whatever their sizes are.
    """
    data = ranks.Numbered(size + 4, batch_size=GLOBAL_BATCH // world)
    data.setup("fit")
    model = ranks.Regression()
    optimizer = model.configure_optimizers()
    losses = []
    gradients = []
    for epoch in range(2):
        loaders = [loader_of(data, rank, world, epoch) for rank in range(world)]
        for batch, parts in enumerate(zip(*loaders, strict=True)):
            loss = model.loss([torch.cat(column) for column in zip(*parts, strict=True)])
            losses.append(loss.item())
            (loss / accumulate).backward()
            if (batch + 1) % accumulate == 0 or batch + 1 == len(loaders[0]):
                gradients.append(
                    torch.cat(
                        [parameter.grad.flatten().clone() for parameter in model.parameters()]
                    )
                )
                optimizer.step()
                optimizer.zero_grad()
    return losses, gradients, model.weights


def loader_of(data: ranks.Numbered, rank: int, world: int, epoch: int) -> ResidentLoader:
    """Return the loader that data module `data` makes for a rank, at the start of an epoch."""
    loader = data.train_dataloader()
    options = {
        "seed": data.seed,
        "shuffle": True,
        "augment": True,
        "flip": True,
        "rank": rank,
        "world_size": world,
    }
    resident_loader = ResidentLoader(
        loader.data, batch_size=data.batch_size, normalize=loader.normalize, **options
    )
    resident_loader.position = lambda: (epoch, 0)
    return resident_loader


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "size", "accumulate"),
    [
        (2, 36, 1),  # whole batches only
        (2, 41, 1),  # the last batch has 5 samples: 3 + 2
        (2, 37, 1),  # the last batch has 13: no rank gets one sample alone
        (3, 41, 1),
        (3, 40, 2),  # two batches a step; the last batch is uneven
        (4, 41, 3),  # and a step of that batch alone
        (4, 38, 1),
    ],
)
def test_gradients_losses_and_weights_are_those_of_one_process(
    tmp_path: Path, world, size, accumulate
):
    ended = ranks.run(fit, size, accumulate, nodes=[world], folder=tmp_path)
    assert not any(rank.error for rank in ended), ended[0].output
    losses, gradients, weights = as_one_process(size, world, accumulate)
    for rank in ended:
        _, _, their_gradients, their_weights = rank.value
        assert len(their_gradients) == len(gradients)
        for gradient, their_gradient in zip(gradients, their_gradients, strict=True):
            torch.testing.assert_close(their_gradient, gradient, **TOLERANCE)
        torch.testing.assert_close(their_weights, weights, **TOLERANCE)
    for batch, loss in enumerate(losses):
        sizes = torch.tensor([len(rank.value[0][batch]) for rank in ended])
        rank_losses = torch.tensor([rank.value[1][batch] for rank in ended])
        torch.testing.assert_close(
            ((sizes * rank_losses).sum() / sizes.sum()).item(), loss, **TOLERANCE
        )
    # All ranks together see each sample once an epoch.
    for epoch in range(2):
        epoch_slice = slice(epoch * len(losses) // 2, (epoch + 1) * len(losses) // 2)
        numbers = [
            number for rank in ended for batch in rank.value[0][epoch_slice] for number in batch
        ]
        assert len(numbers) == len(set(numbers)) == size


def test_lightning_in_one_process_is_plain_pytorch():
    """The same global batches by another path: world size 1."""
    _, losses, gradients, weights = fit(41)
    expected = as_one_process(41, 1)
    torch.testing.assert_close(weights, expected[2], **TOLERANCE)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), **TOLERANCE)


@pytest.mark.slow
def test_without_weights_the_gradients_are_others(tmp_path: Path):
    """Without the weights, DDP counts a sample of a rank with few samples for more."""
    ended = ranks.run(fit, 41, 1, False, folder=tmp_path)
    difference = (ended[0].value[2][3] - as_one_process(41, 2)[1][3]).abs().max()
    assert difference > 1e-2


def fit_with_weighting_alone(size: int):
    """Train two epochs on this rank; return the weights."""
    world = int(ranks.os.environ.get("WORLD_SIZE", 1))
    model = ranks.Regression()
    data = ranks.Numbered(size + 4, batch_size=GLOBAL_BATCH // world)
    ranks.trainer([GradientWeighting()]).fit(model, data)
    return model.weights


@pytest.mark.slow
def test_the_weighting_alone(tmp_path: Path):
    """It knows nothing of the loader; the ranks tell each other how many samples they have."""
    ended = ranks.run(fit_with_weighting_alone, 41, folder=tmp_path)
    assert not ended[0].error, ended[0].output
    for rank in ended:
        torch.testing.assert_close(rank.value, as_one_process(41, 2)[2], **TOLERANCE)


# What the ranks were given ------------------------------------------------------------------------


def host(node: int, **variables: str) -> dict[str, str]:
    """Return the variables that the toolkit gives node `node` of two."""
    return {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": f"algo-{node + 1}"} | variables


@pytest.mark.slow
def test_ranks_with_the_same_settings_train(tmp_path: Path):
    """Variables that name the host differ, and each host draws another random seed."""
    ended = ranks.run(
        fit_by_flags,
        {},
        *SHORT,
        "--seed_everything=true",
        "--lr_scaling=sqrt",
        nodes=[1, 1],
        folder=tmp_path,
        variables=lambda node: host(
            node,
            SM_OUTPUT_DATA_DIR=str(tmp_path / f"one-{node}"),
            SM_CHECKPOINT_DIR=str(tmp_path / f"two-{node}"),
        ),
    )
    assert [rank.value for rank in ended] == [2, 2], ended[1].output
    expected_line = (
        "world_size=2 hosts=2 lr_scaling=sqrt lr=0.001 -> 0.00141421 effective_batch_size=16 "
        "(8 x 2 ranks x 1"
    )
    assert [expected_line in rank.output for rank in ended] == [True, False]


CONTRADICTIONS = {
    "a flag": (
        {},
        {1: ["--data.batch_size=4"]},
        "--data.batch_size: algo-1 (rank 0) has 8, algo-2 (rank 1) has 4; "
        "give all hosts the same flags",
    ),
    "a group of flags": (
        {},
        {1: ["--optimizer=SGD", "--optimizer.lr=0.1"]},
        "--optimizer: algo-1 (rank 0) has None, algo-2 (rank 1) has torch.optim.SGD",
    ),
    "a secret": (
        {},
        {0: ["--logger.name=sk-0123456789abc"], 1: ["--logger.name=sk-1123456789abc"]},
        "--logger.name: algo-1 (rank 0) has ******, algo-2 (rank 1) has ******",
    ),
    "the program": (
        {"SAGEMAKER_LIGHTNING_REVISION": "abc"},
        {},
        "program version: algo-1 (rank 0) has unknown, algo-2 "
        "(rank 1) has abc; start all hosts from the same image",
    ),
    "the hosts": (
        {"SM_HOSTS": '["algo-2", "algo-3"]'},
        {},
        "hosts: algo-1 (rank 0) has algo-1, algo-2, algo-2 (rank 1) has algo-2, algo-3",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "flags", "says"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys()
)
def test_a_contradiction_is_one_line_on_every_rank(tmp_path: Path, variables, flags, says):
    ended = ranks.run(
        fit_by_flags,
        flags,
        *SHORT,
        nodes=[1, 1],
        folder=tmp_path,
        variables=lambda node: host(node, **(variables if node else {})),
    )
    assert len({rank.error for rank in ended}) == 1
    assert ended[0].error.startswith(f"UserError: {says}") and "\n" not in ended[0].error, ended[
        0
    ].output


@pytest.mark.slow
def test_hosts_with_other_files(tmp_path: Path):
    """The files differ in one pixel."""
    for node in range(2):
        folder = conftest.write_cifar(tmp_path / f"data-{node}")
    content = conftest.batch(40, 4)
    content["data"][7, 7] += 1
    (folder / "data_batch_5").write_bytes(pickle.dumps(content))
    ended = ranks.run(
        fit_by_flags,
        {},
        *SHORT,
        "--data.val_split=20",
        nodes=[1, 1],
        folder=tmp_path,
        variables=lambda node: host(node, SM_CHANNEL_TRAINING=str(tmp_path / f"data-{node}")),
    )
    says = (
        r"UserError: dataset fingerprint: algo-1 \(rank 0\) has (\w{16}), algo-2 \(rank 1\) "
        r"has (?!\1)\w{16}; give all"
    )
    assert all(re.match(says, rank.error) for rank in ended), ended[0].output


class Fingerprinted(ranks.Numbered):
    """A user's data module with a method that says what it holds."""

    fingerprint = None

    def setup(self, stage=None):
        super().setup(stage)
        self.fingerprint = lambda: f"set {self.trainer.global_rank}"


def fit_fingerprinted() -> None:
    ranks.trainer([RankConsistency(SageMakerEnvironment(), {})]).fit(
        ranks.Regression(), Fingerprinted(40, batch_size=5)
    )


@pytest.mark.slow
def test_a_users_own_fingerprint(tmp_path: Path):
    ended = ranks.run(fit_fingerprinted, folder=tmp_path)
    says = (
        "UserError: dataset fingerprint: localhost (rank 0) has set 0, localhost (rank 1) has set 1"
    )
    assert all(rank.error.startswith(says) for rank in ended), ended[0].output


class Uneven(ranks.Numbered):
    """A user's own loaders with another length on each rank.

    Lightning gives each rank a part of its loader.
    """

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.arange(20 + 20 * self.trainer.global_rank), batch_size=5
        )


def fit_uneven() -> None:
    ranks.trainer([RankConsistency(SageMakerEnvironment(), {})]).fit(ranks.Regression(), Uneven(40))


@pytest.mark.slow
def test_epochs_of_different_lengths_are_an_error_and_no_hang(tmp_path: Path):
    ended = ranks.run(fit_uneven, folder=tmp_path)
    says = (
        "UserError: batches of an epoch: localhost (rank 0) has 2, localhost (rank 1) has 4; "
        "give all hosts as many"
    )
    assert all(rank.error.startswith(says) for rank in ended), ended[0].output


@pytest.mark.slow
def test_one_rank_says_and_changes_nothing(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command_line = CommandLine(SageMakerEnvironment(), [*SHORT, "--lr_scaling=linear"], APPLICATION)
    command_line.trainer.fit(command_line.model, command_line.datamodule)
    assert command_line.trainer.optimizers[0].param_groups[0]["lr"] == 1e-3
    assert "lr_scaling" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy_options", "expected"), [({}, True), ({"gradient_as_bucket_view": False}, False)]
)
def test_gradients_are_exchanged_where_they_are_unless_an_option_says_otherwise(
    strategy_options, expected
):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(**strategy_options), logger=False
    )
    RankConsistency(SageMakerEnvironment(), {}).setup(trainer, None, "fit")
    assert trainer.strategy._ddp_kwargs["gradient_as_bucket_view"] == expected


@pytest.mark.parametrize(
    ("ranks", "options", "expected"),
    [
        (2, {}, {}),
        (3, {}, {"find_unused_parameters": True}),
        (3, {"find_unused_parameters": False}, {"find_unused_parameters": False}),
    ],
)
def test_three_ranks_exchange_their_gradients_in_one_order(ranks, options, expected):
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=DDPStrategy(**options), logger=False
    )
    RankConsistency(SageMakerEnvironment(), {}).setup(trainer, None, "fit")
    arguments = dict(trainer.strategy._ddp_kwargs)
    assert arguments.pop("gradient_as_bucket_view") and arguments == expected


@pytest.mark.parametrize(
    ("ranks", "static", "warnings_expected"), [(2, True, 0), (3, True, 1), (3, False, 0)]
)
def test_buckets_of_another_order_after_the_first_step_are_reported(
    capsys, ranks, static, warnings_expected
):
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=DDPStrategy(static_graph=static), logger=False
    )
    RankConsistency(SageMakerEnvironment(), {}).setup(trainer, None, "fit")
    assert (
        capsys.readouterr().out.count("static_graph adds the gradients of 3 ranks in another order")
        == warnings_expected
    )


@pytest.mark.parametrize("static", [True, False])
def test_a_static_graph_is_named_where_gradients_are_accumulated_later(capsys, static):
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(static_graph=static),
        logger=False,
        callbacks=[GradientAccumulationScheduler({1: 2})],
    )
    RankConsistency(SageMakerEnvironment(), {}).setup(trainer, None, "fit")
    printed = capsys.readouterr().out
    assert ("cannot be resumed in an epoch in which a Gradient" in printed) == static
    assert printed.count("static_graph") == 2 * static


# One rank of several, in this process -------------------------------------------------------------


class DividedLoader:
    """A loader of ours, as one rank sees it: how many samples each has in a batch."""

    def __init__(self, *sizes: int, batch_size: int | None = None) -> None:
        self.batch_size = batch_size
        self.batch_plan = SimpleNamespace(
            sizes=lambda epoch, batch: list(sizes) if (epoch, batch) == (2, 5) else [0]
        )


def test_a_ranks_share_of_the_batch():
    assert share_of_batch(rank_of(3, [], DividedLoader(4, 3, 3))) == 0.9
    assert share_of_batch(rank_of(2, [], DividedLoader(4, 3, 3))) == 1  # the user's own sampler
    assert share_of_batch(rank_of(3, [], object())) == 1
    assert share_of_batch(rank_of(1, [], DividedLoader(5))) == 1
    for share in (0.5, 2, torch.tensor(0.5), torch.tensor(1.0)):
        assert gradient_after(partial(weight_gradients, share=share)) == 4 * share
    weight_gradients(torch.tensor(1.0), 0.5)  # a loss that has no gradient
    consistency = RankConsistency(SageMakerEnvironment())
    trainer = rank_of(3, [], DividedLoader(4, 3, 3))
    assert gradient_after(partial(consistency.on_before_backward, trainer, None)) == 4 * 0.9


def gradient_after(hook: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return the gradient of a loss that a hook has seen before; it is 4 without the hook."""
    weight = torch.ones(1, requires_grad=True)
    loss = (4 * weight).sum()
    hook(loss)
    loss.backward()
    return weight.grad


def test_the_weighting_asks_nothing_of_a_single_rank():
    """Its batch may be anything, even without a size."""
    weighting = GradientWeighting()
    weighting.on_train_batch_start(rank_of(1, []), None, object(), 0)
    assert weighting.weight == 1
    strategy = SimpleNamespace(reduce=lambda own, reduce_op: own + 4)
    module = SimpleNamespace(device=torch.device("cpu"))
    weighting.on_train_batch_start(rank_of(2, [], strategy=strategy), module, torch.ones(6, 1), 0)
    assert weighting.weight == 1.2
    assert gradient_after(partial(weighting.on_before_backward, None, None)) == 4 * 1.2


def test_the_second_training_of_a_trainer_is_scaled_too():
    consistency = RankConsistency(SageMakerEnvironment(), {}, "linear")
    for _ in range(2):
        trainer = rank_of(2, [{"lr": 0.1}], strategy=None)
        consistency.setup(trainer, None, "fit")
        consistency.on_train_start(trainer, None)
        assert trainer.optimizers[0].param_groups == [{"lr": 0.2}]


@pytest.mark.parametrize("part", [GradientWeighting(), LearningRateScaling()])
def test_what_it_does_itself_is_refused_beside_it(part):
    trainer = rank_of(1, [], callbacks=[object(), part], strategy=None)
    says = rf"^Trainer\(callbacks=...\): found {type(part).__name__}, which RankConsistency and "
    with pytest.raises(UserError, match=says):
        RankConsistency(SageMakerEnvironment()).setup(trainer, None, "fit")


@pytest.mark.parametrize(
    ("restored", "expected"),
    [
        ([0.2, 0.4], [0.02, 0.04]),  # of which the half is the factor of two ranks
        ([0.02, 0.04], [0.02, 0.04]),
        ([0.01, 0.02], [0.02, 0.04]),
        ([0.0, 0.4], [0.0, 0.04]),  # a rate of 0 stays
        ([0.0, 0.0], [0.0, 0.0]),
        ([0.2, 0.2], None),
    ],
)
def test_another_rate_is_that_of_the_flags_for_all_ranks(restored, expected):
    consistency = RankConsistency(SageMakerEnvironment(), {}, "linear", other_rate=True)
    flags = rank_of(2, [{"lr": 0.001, "initial_lr": 0.01}, {"lr": 0.02}, {"no rate": 1}])
    consistency.setup(SimpleNamespace(callbacks=[], strategy=None), None, "fit")
    consistency.on_fit_start(flags, None)
    consistency.load_state_dict({"lr_factor": 2.0})
    trainer = rank_of(2, [{"lr": rate} for rate in restored])
    if expected is None:
        says = r"by different factors \(0.1 to 0.2\), expected one factor for all"
        with pytest.raises(UserError, match=says):
            consistency.on_train_start(trainer, None)
        return
    consistency.on_train_start(trainer, None)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    assert rates == pytest.approx(expected)
    assert consistency.state_dict() == {"lr_factor": 2.0}


@pytest.mark.parametrize(
    ("loader", "module", "says"),
    [
        (DividedLoader(3, 3, batch_size=3), None, "24 (3 x 2 ranks x 4 accumulated)"),
        (None, SimpleNamespace(batch_size=5), "40 (5 x 2 ranks x 4 accumulated)"),
        (DividedLoader(3, 3), None, "unknown (unknown x 2 ranks x 4 accumulated)"),
    ],
)
def test_the_line_on_what_all_ranks_do(loader, module, says, capsys):
    consistency = RankConsistency(SageMakerEnvironment(hosts=("a", "b")), {}, "linear")
    rates = [{"lr": 0.1}, {"lr": 0.3}, {"lr": 0.1}]
    options = {"datamodule": module, "accumulate_grad_batches": 4}
    consistency.on_train_start(rank_of(2, rates, loader, **options), None)
    line = (
        f"world_size=2 hosts=2 lr_scaling=linear lr=0.1,0.3 -> 0.2,0.6 effective_batch_size={says}"
    )
    assert capsys.readouterr().out == f"{line}\n"
    resumed = [{"lr": 0.2}, {"lr": 0.6}]
    consistency.on_train_start(rank_of(2, resumed, loader, **options), None)
    assert resumed == [{"lr": 0.2}, {"lr": 0.6}] and capsys.readouterr().out == f"{line}\n"
    consistency.on_train_start(rank_of(2, [{}], loader, is_global_zero=False), None)
    consistency.on_train_start(rank_of(1, [{"lr": 0.1}], loader, **options), None)
    assert not capsys.readouterr().out
    consistency.on_train_start(rank_of(2, [{}], loader, **options), None)
    assert " lr=none -> none " in capsys.readouterr().out


@pytest.mark.parametrize(("size", "first", "warns"), [(5, True, 1), (6, True, 0), (5, False, 0)])
def test_a_batch_is_larger_than_the_data_if_it_is_not_filled(capsys, size, first, warns):
    division = SimpleNamespace(batch_size=3, ranks=2, size=size)
    for parts in ({"epoch_plan": SimpleNamespace(division=division)}, {"division": division}):
        loader = SimpleNamespace(batch_plan=SimpleNamespace(**parts))
        RankConsistency(SageMakerEnvironment(), {}).on_train_start(
            rank_of(1, [], loader, is_global_zero=first), None
        )
        says = f"warning: a batch size of 3 on 2 rank(s) is more than the {size} samples there are"
        assert capsys.readouterr().out.count(says) == warns
    endless = SimpleNamespace(batch_plan=SimpleNamespace(epoch_plan=None))
    RankConsistency(SageMakerEnvironment(), {}).on_train_start(rank_of(1, [], endless), None)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("hosts", "channels", "rank", "world", "warns"),
    [
        (2, ("mine", "also"), 0, 2, 1),
        (3, ("mine", "also"), 0, 2, 1),
        (2, ("mine", "also"), 1, 2, 0),
        (1, ("mine", "also"), 0, 2, 0),
        (2, (), 0, 2, 0),
        (2, ("mine", "also"), 0, 1, 0),
    ],
)
def test_samples_that_hosts_and_then_ranks_divide_are_reported(
    capsys, hosts, channels, rank, world, warns
):
    loader, _ = make_resumable(
        torch.utils.data.DataLoader(range(12), 2), 1, rank=0, world_size=world
    )
    environment = SageMakerEnvironment(
        hosts=tuple("abc"[:hosts]), current_host="a", sharded_channels=frozenset(channels)
    )
    trainer = rank_of(2, [], loader, is_global_zero=rank == 0)
    RankConsistency(environment, {}).on_train_start(trainer, None)
    says = "each host has other files of the channel also, mine (ShardedByS3Key)"
    output = capsys.readouterr().out
    assert output.count(says) == warns
    assert (f"a host trains on about one in {hosts} of its own samples" in output) == bool(warns)


def test_what_a_host_was_given_is_not_a_contradiction():
    """A folder may contain another one, or the host's name."""
    places = [
        {"output": "/ml/out", "checkpoints": "/ml/out/a/points", "host": "a"},
        {"output": "/tmp/b", "checkpoints": "/points", "host": "algo-b"},
    ]
    ours = {"folder": "/ml/out/a/points/x", "logs": "/ml/out/logs", "name": "run-a"}
    theirs = {"folder": "/points/x", "logs": "/tmp/b/logs", "name": "run-algo-b"}
    refuse_contradictions([("a", places[0], ours), ("algo-b", places[1], theirs)])
    with pytest.raises(UserError, match=r"^logs: a \(rank 0\) has /ml/out/logs, algo-b \(rank 1\)"):
        refuse_contradictions(
            [("a", places[0], ours), ("algo-b", places[1], theirs | {"logs": "/points/logs"})]
        )
    with pytest.raises(
        UserError, match=r"^name: a \(rank 0\) has run-a, algo-b \(rank 1\) has noth"
    ):
        refuse_contradictions(
            [
                ("a", places[0], ours),
                ("algo-b", places[1], {"folder": "/points/x", "logs": "/tmp/b/logs"}),
            ]
        )


def test_settings_are_compared_before_the_lengths_of_an_epoch(monkeypatch):
    """One rank asks nobody."""
    answers_of_b = {"folder": "/b/x"}

    def gather(own_answer: tuple) -> list[tuple]:
        _, _, settings = own_answer
        settings_of_b = {name: answers_of_b.get(name, settings[name]) for name in settings}
        return [own_answer, ("b", {"output": "/b", "host": "b"}, settings_of_b)]

    monkeypatch.setattr(rank_consistency, "gather", gather)
    environment = SageMakerEnvironment(hosts=("a", "b"), current_host="a", output_data_dir="/a")
    consistency = RankConsistency(environment, {"folder": "/a/x", "seed": 7})
    consistency.on_fit_start(rank_of(2, []), None)
    consistency.on_train_start(rank_of(2, []), None)
    answers_of_b["batches of an epoch"] = "4"
    consistency.on_fit_start(rank_of(2, []), None)
    says = r"^batches of an epoch: a \(rank 0\) has 3, b \(rank 1\) has 4; give all hosts as many"
    with pytest.raises(UserError, match=says):
        consistency.on_train_start(rank_of(2, []), None)
    answers_of_b["seed"] = "8"
    says = r"^seed: a \(rank 0\) has 7, b \(rank 1\) has 8; give all hosts the same flags$"
    with pytest.raises(UserError, match=says):
        consistency.on_fit_start(rank_of(2, []), None)
    monkeypatch.setattr(rank_consistency, "gather", pytest.fail)
    consistency.on_fit_start(rank_of(1, []), None)
    consistency.on_train_start(rank_of(1, []), None)


def test_what_is_compared_of_the_data():
    consistency = RankConsistency(SageMakerEnvironment(hosts=("a", "b")), {"seed": 7})
    for module, expected in (
        (None, {}),
        (SimpleNamespace(fingerprint="x1"), {"dataset fingerprint": "x1"}),
        (SimpleNamespace(fingerprint=lambda: "x2"), {"dataset fingerprint": "x2"}),
        (SimpleNamespace(fingerprint="x1", sharded=True), {}),
    ):
        trainer = SimpleNamespace(world_size=2, datamodule=module)
        found = consistency._settings_to_compare(trainer)
        assert found.pop("program version") == consistency.environment.revision
        assert found == {"world size": 2, "hosts": "a, b", "seed": 7} | expected
