"""What no checkpoint can bring back is said in the run that is not interrupted."""

import hashlib
from types import SimpleNamespace

import pytest
from short_fits import Noted, alone_and_resumed, trainer, training, weights
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchmetrics import MeanMetric

from sagemaker_lightning.compat.model_parallel import settle_sharded_classes
from sagemaker_lightning.resume.parts import reports as module_of_reports
from sagemaker_lightning.resume.parts.reports import Reports


class Growing(Noted):
    """Gets a layer, and its optimizer the parameters, at the start of each later epoch."""

    def __init__(self, **moments: str) -> None:
        super().__init__(**moments)
        self.layers = nn.ModuleList()

    def on_train_epoch_start(self):
        if self.current_epoch > len(self.layers):
            self.layers.append(nn.Linear(1, 1))
            self.optimizers().optimizer.add_param_group({"params": self.layers[-1].parameters()})


def test_layers_that_are_made_while_training_and_trained_come_back(tmp_path, capfd):
    train = training(Growing, max_epochs=3)
    alone, resumed = alone_and_resumed(train, tmp_path, "batch 1:2", "batch 2:1")
    assert weights(resumed) == weights(alone) and len(resumed.layers) == 2
    rates = [[group["lr"] for group in of.optimizers().param_groups] for of in (resumed, alone)]
    assert rates[0] == rates[1] and len(rates[0]) == 3
    assert "made while training" not in capfd.readouterr().out


def test_a_model_that_stays_as_it_is_made_is_not_named(tmp_path, capfd):
    trainer(tmp_path).fit(Noted())
    assert "was made while training" not in capfd.readouterr().out


def reports_of(rank: int = 0, model: object = None, module: nn.Module | None = None) -> Reports:
    """Return the reports of a rank that has no objects of the user's.

    Args:
        rank: The rank.
        model: The model, as the strategy has it.
        module: The module that is trained.
    """
    trainer = SimpleNamespace(
        is_global_zero=rank == 0,
        strategy=SimpleNamespace(model=model),
        lightning_module=module or nn.Module(),
    )
    return Reports(trainer, SimpleNamespace(reached=lambda *classes: ()))


def test_a_copy_in_memory_leaves_variables_to_the_next_checkpoint(monkeypatch, capsys):
    reports = reports_of()
    reports.variables_at_start = {"mine.count": b"1"}
    monkeypatch.setattr(reports, "_variables_of_packages", dict)
    monkeypatch.setattr(reports, "_variables", lambda of_packages: {"mine.count": b"2"})
    monkeypatch.setattr(module_of_reports, "places_of_code", lambda trainer: {})
    with reports.wait_for_checkpoint():
        reports.report_variables()
    assert capsys.readouterr().out == ""
    reports.report_variables()
    assert capsys.readouterr().out.startswith("warning: mine.count changes while training, ")


@pytest.mark.parametrize(
    ("hook", "state", "says"),
    [
        (default_hooks.bf16_compress_hook, None, ""),
        (powerSGD_hook.powerSGD_hook, {}, "powerSGD_hook"),
        (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), {}, "fp16_compress_wr"),
        (Growing.configure_optimizers, None, "Noted.configure_optimizers"),
    ],
)
def test_a_hook_that_may_see_other_buckets_is_named(monkeypatch, capsys, hook, state, says):
    monkeypatch.setattr(module_of_reports, "communication_hooks", lambda model: [(hook, state)])
    monkeypatch.setattr(module_of_reports, "orders_buckets", lambda model: True)
    trainer = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(model=None))
    Reports(trainer, None)._report_hooks_of_buckets()
    assert capsys.readouterr().out.startswith(says and f"warning: {says}")


class Hashing(Noted):
    """Keeps a running hash, which nobody can read."""

    def __init__(self, **moments: str) -> None:
        super().__init__(**moments)
        self.hash = hashlib.sha256()

    def training_step(self, batch, batch_idx):
        self.hash.update(b"1")
        return super().training_step(batch, batch_idx)


def test_each_resume_says_what_no_checkpoint_has(tmp_path, capfd):
    train = training(Hashing, max_epochs=3)
    alone_and_resumed(train, tmp_path, "batch 1:2", "batch 2:1")
    printed = capfd.readouterr().out
    resumed = [line for line in printed.splitlines() if "bit for bit" in line]
    assert len(resumed) >= 2
    name = f"{__name__}.Hashing.hash"
    assert all(line.endswith(f"bit for bit; no checkpoint has {name}") for line in resumed)


def test_what_another_rank_has_to_say_is_said_once_by_rank_0(capsys):
    ranks = [reports_of(rank) for rank in range(3)]
    ranks[0]._report_changed(["mine.count"])
    ranks[1]._report_changed(["mine.count", "mine.rank_1"])
    ranks[2]._report_changed(["mine.rank_2", "mine.other"])
    assert capsys.readouterr().out.count("warning: ") == 1
    for _ in range(2):
        lines = [each.take_lines() for each in ranks]
        for each in ranks:
            each.say_of_ranks(lines)
    says = [line.partition(" changes")[0] for line in capsys.readouterr().out.splitlines()]
    assert says == ["warning: rank 1: mine.rank_1", "warning: rank 2: mine.other"]
    assert ranks[1].lost == ["mine.count", "mine.rank_1"]


def test_how_ranks_add_up_gradients_is_named_once_it_changes(monkeypatch):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        shared = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        network = nn.Sequential(nn.Linear(1, 1))
        fully_shard(network[0], mesh=init_device_mesh("cpu", (1,)))
        settle_sharded_classes(network)
        network[0].set_gradient_divide_factor(2.0)
        reports = reports_of(0, shared, network)
        reports.settings_at_start = before = reports._settings()
        assert reports._settings() == before
        network[0].set_gradient_divide_factor(3.0)
        network[0].set_force_sum_reduction_for_comms(True)
        shared.require_backward_grad_sync = False
        shared.register_comm_hook(None, default_hooks.allreduce_hook)
        changed = {name for name, value in reports._settings().items() if before.get(name) != value}
    finally:
        distributed.destroy_process_group()
    assert changed == {
        "0.set_gradient_divide_factor()",
        "0.set_force_sum_reduction_for_comms()",
        "require_backward_grad_sync of DDP",
        "register_comm_hook() of DDP",
    }


class Kept(Noted):
    """Makes a metric for each epoch; keeps those of the epochs before, or a list of its own."""

    keeps = True

    def __init__(self, **moments: str) -> None:
        super().__init__(**moments)
        self.past = []

    def on_train_epoch_start(self):
        if not self.keeps:
            self.past = []
        self.past.append(MeanMetric())


@pytest.mark.parametrize("keeps", [True, False])
def test_metrics_of_earlier_epochs_that_a_list_keeps_are_named(tmp_path, capfd, monkeypatch, keeps):
    monkeypatch.setattr(Kept, "keeps", keeps)
    trainer(tmp_path, max_epochs=2).fit(Kept())
    says = "Kept.past holds a torchmetrics.aggregation.MeanMetric, which cannot be saved"
    assert (says in capfd.readouterr().out) is keeps


class Opening(Noted):
    """Opens a file in its first step."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 0:
            self.file = open("log", "a")  # noqa: PTH123, SIM115  (as users write it)

    def on_train_batch_end(self, *_):
        self.file.write("1")


def test_an_attribute_that_a_resumed_run_misses_is_explained(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = training(Opening, max_epochs=2)
    with pytest.raises(AttributeError, match="file"):
        alone_and_resumed(train, tmp_path, "batch 0:1")
    assert "model.file: the interrupted run had a _io.TextIOWrapper" in capfd.readouterr().out
