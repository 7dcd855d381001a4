"""compat/: what its functions do with this version of Lightning, torch and the others."""

import copy
import os
import pickle
import random
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy
import pytest
import pytorch_lightning
import torch
from containers import ROOT
from jsonargparse import _typehints
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch._dynamo import config as dynamo
from torch._dynamo.pgo import FrameStateSizeEntry
from torch._inductor import config as inductor
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric

from sagemaker_lightning.compat import (
    jsonargparse_types,
    lightning_callbacks,
    lightning_checkpoints,
    lightning_loaders,
    lightning_loops,
    lightning_metrics,
    lightning_trainer,
    metrics,
    namespaces,
    random_generators,
    torch_compile,
    torch_data,
    torch_modules,
    versions,
)
from sagemaker_lightning.contract.environment import failure_file, place
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.process import lightning_import


def test_a_version_that_is_not_supported_is_one_line(monkeypatch):
    """And none is said of the others, nor where a package has no metadata."""
    has = {}
    monkeypatch.setattr(versions, "version", lambda name: has.get(name, ""))
    name = namespaces.distribution()
    for installed in ("", "2.5.2", "2.5.10", "2.6", "2.6.0.post0", "2.6.7rc1"):
        has[name] = installed
        lightning_import.check_version()
    for installed in ("1.9.5", "2.5.1.post0", "2.7", "2.7.0", "2.10.1", "3.0.0"):
        has[name] = installed
        says = f"^requirements.txt: found {name} {installed}, expected 2.5.2 or later"
        with pytest.raises(UserError, match=says):
            lightning_import.check_version()
    has[name] = "2.6.6"
    for installed in ("2.11", "2.11.0", "2.15.0+cu130", "3.0"):
        has["torch"] = installed
        lightning_import.check_version()
    has["torch"] = "2.9.1"
    with pytest.raises(UserError, match="^torch: found 2.9.1, expected 2.11 or later"):
        lightning_import.check_version()
    assert not versions.unsupported(name, pytorch_lightning.__version__)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train.py", "train_multi_node.py"])
def test_a_job_that_has_installed_another_version_ends_with_that_line(tmp_path: Path, program):
    """Before Lightning is imported, which may fail, and as the job's FailureReason."""
    name = namespaces.distribution()
    installed = tmp_path / f"installed/{name.replace('-', '_')}-2.4.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.4.0\n")
    variables = os.environ | {
        "PYTHONPATH": f"{installed.parent}:{ROOT}",
        "SM_OUTPUT_DIR": str(tmp_path),
    }
    command = [sys.executable, str(ROOT / "app" / program)]
    completed = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    # A busy machine prints these lines, too.
    (error_line,) = (
        line for line in completed.stderr.splitlines() if not line.startswith("starting: ")
    )
    expected = (
        f"error: requirements.txt: found {name} 2.4.0, expected 2.5.2 or later and below 2.7; give "
    )
    assert completed.returncode == 1 and error_line.startswith(expected)
    assert (tmp_path / "failure").read_text() == error_line


def refuse() -> None:
    raise UserError("a malicious release")


@pytest.mark.parametrize(
    ("name", "returns", "says"),
    [
        ("imported", lambda: [*namespaces.PACKAGES], "^import lightning, import pytorch_lightning"),
        ("distribution", lambda: "", "^Lightning: not installed in "),
        ("refuse_malicious", refuse, "^a malicious release$"),
    ],
)
def test_what_is_wrong_with_an_installation_is_reported_as_a_failure(
    monkeypatch, name, returns, says
):
    """A program imports our names before it can enter report_failures."""
    reported = []
    monkeypatch.setattr(versions, "report_uncaught", lambda *where: reported.append(where))
    versions.check()
    assert not reported
    monkeypatch.setattr(namespaces, name, returns)
    with pytest.raises(UserError, match=says):
        versions.check()
    assert reported == [(failure_file(), place())]


def test_an_average_counts_again_even_after_an_error():
    callback = StochasticWeightAveraging(swa_lrs=0.1)
    epoch_before = callback._latest_update_epoch
    with pytest.raises(ZeroDivisionError), lightning_callbacks.weights_averaged_in(callback, 7):
        assert callback._latest_update_epoch == 7
        raise ZeroDivisionError
    assert callback._latest_update_epoch == epoch_before != 7


def test_int_comes_before_float_and_all_else_stays():
    for types_before, types_after in (
        ([str, float, bool, int], [str, int, float, bool]),
        ([int, str, float], [int, str, float]),
        ([float, str], [float, str]),
        ([str, int], [str, int]),
        ([], []),
    ):
        assert jsonargparse_types.int_before_float(types_before) == types_after


def test_jsonargparse_tries_int_first_once_whole_numbers_are_kept(monkeypatch):
    monkeypatch.setattr(_typehints, "sort_subtypes_for_union", lambda types, **_: types)
    jsonargparse_types.keep_whole_numbers()
    sort = _typehints.sort_subtypes_for_union
    assert sort([str, float, int], append=False) == [str, int, float]
    jsonargparse_types.keep_whole_numbers()
    assert _typehints.sort_subtypes_for_union is sort


def test_a_callback_is_called_as_a_run_begins_and_can_log():
    class Early(lightning_callbacks.EarlyCallback):
        def run_begins(self, trainer):
            self.began = trainer

    module = BoringModel()
    trainer = pytorch_lightning.Trainer(accelerator="cpu", logger=False, barebones=True)
    module._trainer = trainer
    callback = Early()
    callback.log = module.log
    assert callback.began is trainer and callback.log == module.log


def test_masks_are_saved_also_of_a_pruning_that_is_permanent():
    permanent, other = (
        ModelPruning("l1_unstructured", make_pruning_permanent=choice) for choice in (True, False)
    )
    trainer = types.SimpleNamespace(callbacks=[object(), permanent, other])
    with (
        pytest.raises(ZeroDivisionError),
        lightning_callbacks.saving_pruning_masks(trainer),
    ):
        assert not permanent._make_pruning_permanent
        raise ZeroDivisionError
    assert permanent._make_pruning_permanent and not other._make_pruning_permanent
    assert not list(lightning_callbacks.original_weights(object()))
    assert not list(lightning_callbacks.original_weights(permanent))


def test_what_a_search_looks_for():
    rate, batch = LearningRateFinder(attr_name="rate"), BatchSizeFinder(batch_arg_name="size")
    for search, name in ((rate, "rate"), (batch, "size"), (LearningRateFinder(), "")):
        assert lightning_callbacks.is_search(search)
        assert lightning_callbacks.searched_attribute(search) == name
    assert not lightning_callbacks.is_search(pytorch_lightning.Callback())
    trainer = types.SimpleNamespace(callbacks=[pytorch_lightning.Callback(), rate, batch])
    assert not lightning_callbacks.is_search_only(trainer)
    batch._early_exit = True
    assert lightning_callbacks.is_search_only(trainer)


@pytest.mark.parametrize("shares", [True, False])
def test_a_loader_that_is_prepared_without_a_sampler(shares):
    """What the trainer was given is as before, even after an error."""
    connector = types.SimpleNamespace(use_distributed_sampler=shares)

    class Data:
        def _prepare_dataloader(self, dataloader, shuffle, mode):
            return connector.use_distributed_sampler, 1 / dataloader, shuffle, mode

    trainer = types.SimpleNamespace(_accelerator_connector=connector, _data_connector=Data())
    lightning_loaders.evaluate_everything_on_each_rank(trainer)
    prepare = lightning_loaders.preparation(trainer)
    assert prepare(4, True, "test") == (False, 0.25, True, "test")
    with pytest.raises(ZeroDivisionError):
        prepare(0, True, "test")
    assert lightning_loaders.shares_loaders(trainer) is shares
    lightning_loaders.restore_preparation(trainer)
    lightning_loaders.restore_preparation(trainer)
    prepared = lightning_loaders.preparation(trainer)(4, False, "fit")
    assert prepared == (shares, 0.25, False, "fit")
    assert lightning_loaders.flattened(None) == []


def test_a_loader_forgets_where_it_was():
    loader = lightning_loaders.PositionedLoader([[1, 2], [3, 4]], "min_size")
    loader.forget_iterators()
    iter(loader)
    next(loader)
    assert loader._iterator.iterators
    loader.forget_iterators()
    assert not loader._iterator.iterators and loader._state_dicts() == []


def test_generators_are_seeded_by_the_system_again_after_a_block():
    before = random.Random.seed, random.seed, numpy.random.bit_generator.randbits
    asked = []
    with (
        pytest.raises(ZeroDivisionError),
        random_generators.entropy_replaced(lambda bits: asked.append(bits) or 7),
    ):
        drawn = [random.Random().random(), random.Random(None).random(), random.Random(5).random()]
        assert numpy.random.default_rng().random() == numpy.random.default_rng().random()
        raise ZeroDivisionError
    assert asked[:2] == [128, 128] and drawn[0] == drawn[1] == random.Random(7).random()
    assert drawn[2] == random.Random(5).random()
    assert before == (random.Random.seed, random.seed, numpy.random.bit_generator.randbits)


def test_a_text_seeds_as_ever_while_entropy_is_replaced():
    with random_generators.entropy_replaced(lambda bits: 7):
        drawn = random.Random("text").random()
    assert drawn == random.Random("text").random()


def test_each_shape_is_compiled_for_itself_until_the_block_ends():
    def settings() -> tuple:
        return (
            FrameStateSizeEntry.is_size_dynamic,
            FrameStateSizeEntry.is_stride_dynamic,
            dynamo.recompile_limit,
            inductor.deterministic,
        )

    before = settings()
    with pytest.raises(ZeroDivisionError), torch_compile.compile_each_shape():
        size_is_dynamic, stride_is_dynamic, limit, is_deterministic = settings()
        assert not size_is_dynamic(None, 0) and not stride_is_dynamic(None, 0)
        assert limit >= torch_compile.MAX_SHAPES > before[2] and is_deterministic
        raise ZeroDivisionError
    assert settings() == before


def test_what_a_strategy_does_with_this_process():
    strategy = DDPStrategy(find_unused_parameters=True)
    assert lightning_trainer.ddp_arguments(strategy) == {"find_unused_parameters": True}
    lightning_trainer.ddp_arguments(strategy)["bucket_cap_mb"] = 5
    assert strategy._ddp_kwargs["bucket_cap_mb"] == 5
    assert not lightning_trainer.copies_this_process(strategy)
    assert lightning_trainer.copies_this_process(DDPStrategy(start_method="fork"))


def test_a_metrics_saved_state_is_a_copy():
    """A metric may add in place to what it has."""
    metric = MeanMetric()
    metric.update(3.0)
    saved = metrics.state_of(metric)
    values = {name: value.clone() for name, value in saved["states"].items()}
    restored = MeanMetric()
    metrics.restore(restored, saved, torch.device("cpu"))
    assert restored.compute() == 3 and restored.update_count == 1
    for name in saved["states"]:
        getattr(restored, name).add_(1)
    assert saved["states"] == values


@pytest.mark.parametrize(
    ("given", "passed"),
    [({}, True), ({"weights_only": None}, True), ({"weights_only": False}, False)],
)
def test_a_checkpoint_is_loaded_without_its_code_unless_somebody_has_chosen_that(given, passed):
    """Lightning has the choice since 2.6."""
    called = []

    class Connector:
        _loaded_checkpoint = dict.fromkeys(("state_dict", "optimizer_states", "lr_schedulers"))

        def resume_start(self, checkpoint_path=None, weights_only=None):
            called.append((checkpoint_path, weights_only))

    class EarlierConnector(Connector):
        def resume_start(self, checkpoint_path=None):
            called.append((checkpoint_path,))

    for connector in (Connector(), EarlierConnector()):
        trainer = types.SimpleNamespace(
            _checkpoint_connector=connector, state=types.SimpleNamespace(fn=TrainerFn.FITTING)
        )
        lightning_checkpoints.replace_loading(trainer, lambda path: path == "ours", len)
        connector.resume_start("ours", **given)
        connector.resume_start("other", **given)
    assert called == [("other", passed), ("other",)]


def test_the_hooks_of_a_module_and_of_its_optimizer():
    module = torch.nn.Linear(1, 1, bias=False)
    module.register_parameter("later", None)
    assert torch_modules.hooks(module) == [] == torch_modules.hooks(torch.nn.LazyLinear(1))
    hooks = [(lambda *_, number=number: None) for number in range(6)]
    module.register_forward_hook(hooks[0])
    module.register_forward_pre_hook(hooks[1])
    module.register_full_backward_hook(hooks[2])
    module.register_full_backward_pre_hook(hooks[3])
    module.weight.register_hook(hooks[4])
    module.weight.register_post_accumulate_grad_hook(hooks[5])
    assert torch_modules.hooks(module) == hooks
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.register_step_pre_hook(hooks[0])
    optimizer.register_step_post_hook(hooks[1])
    assert torch_modules.step_hooks(optimizer) == hooks[:2]
    copied = module.state_dict().copy()
    state = type(copied)(copied.items())
    torch_modules.keep_metadata(state, module.state_dict())
    assert state._metadata == module.state_dict()._metadata
    torch_modules.keep_metadata(plain := {}, {})
    assert not hasattr(plain, "_metadata")


def test_a_loader_is_copied_without_its_workers():
    numbers = [1, 2]
    loader = DataLoader(numbers, num_workers=1, persistent_workers=True, timeout=5)
    iterator = iter(loader)
    copied = torch_data.copied(loader)
    assert [batch.item() for batch in copied] == [1, 2]
    assert copied.dataset == numbers and copied.dataset is not numbers
    assert torch_data.copied(DataLoader([threading.Lock()])) is None
    torch_data.end_workers(loader)
    del iterator


def test_workers_end_with_their_loader():
    ended = []
    loader = types.SimpleNamespace(
        _iterator=types.SimpleNamespace(_shutdown_workers=lambda: ended.append(1))
    )
    assert torch_data.has_iterator(loader)
    for _ in range(2):
        torch_data.end_workers(loader)
    torch_data.end_workers(object())
    assert ended == [1] and not torch_data.has_iterator(loader) and loader._iterator is None


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            FileNotFoundError(2, "No such file", "x"),
            r"read \(No such file\); expected one that a T",
        ),
        (OSError("odd"), r"read \(OSError: odd\); expected"),
        (KeyError(101), r"read \(KeyError: 101\); expected"),
        (ValueError("a. b\nc"), r"read \(ValueError: a\); expected"),
        (
            pickle.UnpicklingError("Weights only load failed. x\nWeightsUnpickler error: no"),
            r"read \(no\); expected .* saved, or weights_only=False if its objects are yours$",
        ),
        (
            pickle.UnpicklingError("Weights only load failed: y"),
            r"read \(UnpicklingError: Weights only load failed: y\); .*, or weights_only=False",
        ),
    ],
)
def test_a_file_that_is_not_a_checkpoint_says_so(error, says):
    with pytest.raises(UserError, match=says), lightning_checkpoints._refused("x.ckpt"):
        raise error
    with pytest.raises(MemoryError), lightning_checkpoints._refused("x.ckpt"):
        raise MemoryError


class Logs(BoringModel):
    """A model that logs the values that it is given, in each way that Lightning has."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = values
        self.largest = MaxMetric()

    def training_step(self, batch, batch_idx):
        value = torch.tensor(self.values[batch_idx])
        self.largest(value)
        self.log("loss", value, on_step=True, on_epoch=True)
        self.log("sum", value, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.log("of a group", value, on_step=False, on_epoch=True, sync_dist_group="a group")
        return super().training_step(batch, batch_idx)


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


def test_an_epochs_logged_values_continue_in_another_trainer():
    """But not those of a group of processes, which cannot be saved."""
    saved = {}

    class Save(pytorch_lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                saved["sums"] = copy.deepcopy(lightning_metrics.epoch_sums(trainer))
                saved["newest"] = lightning_metrics.newest_values(trainer)

    class Restore(pytorch_lightning.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.largest.update(2.0)
            assert trainer.callback_metrics == {}
            lightning_metrics.set_newest_values(trainer, saved["newest"])
            assert trainer.callback_metrics == saved["newest"]["_callback_metrics"]
            device = torch.device("cpu")
            sums = [saved["sums"]]
            lightning_metrics.restore_epoch_sums(trainer, sums, sums, device)
            results = trainer.fit_loop.epoch_loop._results
            assert results["training_step.loss"]._forward_cache == 2
            assert results["training_step.sum"]._forward_cache is None

    alone = fit(Logs(1.0, 2.0, 4.0, 8.0), Save()).callback_metrics
    assert saved["newest"]["_callback_metrics"]["loss_step"] == 1  # Lightning has not shown the 2
    assert alone["loss_epoch"] == 15 / 4 and alone["sum"] == 15 and alone["largest"] == 8
    resumed = fit(Logs(4.0, 8.0), Restore(), limit_train_batches=2).callback_metrics
    assert alone.pop("of a group") != resumed.pop("of a group") == 6
    assert resumed == alone


class Watches(pytorch_lightning.Callback):
    """Asks the loops where they are."""

    def __init__(self) -> None:
        self.batches = []
        self.validations = []

    def on_train_batch_end(self, trainer, *_):
        self.batches.append(
            (
                lightning_loops.gradients_accumulate(trainer),
                lightning_loops.batches_are_done(trainer),
                lightning_loops.epoch_is_done(trainer),
            )
        )

    def on_validation_start(self, trainer, pl_module):
        was_training = pl_module.training
        lightning_loops.end_evaluation_mode(trainer)
        self.validations.append(
            (
                was_training,
                pl_module.training,
                lightning_loops.epoch_of_loaders(trainer),
                lightning_loops.epoch_of_validation_loaders(trainer),
            )
        )


def test_where_lightnings_loops_are():
    watches = Watches()
    options = {"max_epochs": 3, "max_steps": 5, "accumulate_grad_batches": 2}
    trainer = fit(
        BoringModel(),
        watches,
        **options,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=2,
    )
    assert watches.batches == [
        *2
        * [(True, False, False), (False, False, False), (True, False, False), (False, True, True)],
        (True, False, False),
        (False, False, True),
    ]
    assert watches.validations[:2] == [(False, True, 0, 0)] * 2
    assert lightning_loops.epoch_of_validation_loaders(trainer) == watches.validations[-1][3]
    assert lightning_loops.fetcher(trainer) is None


def test_a_batch_is_moved_as_training_does_it():
    """The hooks are told that it is of the first loader, as in training."""

    class Moves(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.asked = []

        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.asked.append(("before", dataloader_idx))
            return batch + 1

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            self.asked.append(("move", dataloader_idx))
            return batch * 2

    class Transfers(pytorch_lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.moved = lightning_loops.transfer_batch(trainer, torch.ones(2))

    model = Moves()
    fit(model, Transfers(), limit_train_batches=1)
    assert model.moved.tolist() == [4, 4]
    assert model.asked == 2 * [("before", 0), ("move", 0)]


def test_loops_are_lightnings_again():
    """What they have of ours is gone, even if it was never there."""
    trainer = pytorch_lightning.Trainer(max_steps=3, accelerator="cpu", logger=False)
    loop = trainer.fit_loop
    classes = [type(each) for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop)]
    attributes = set(vars(loop.epoch_loop))
    lightning_loops.disable_signal_broadcast(trainer)
    assert loop.epoch_loop._broadcast_sigterm_tensor() is None
    loop.__class__ = lightning_loops.FitLoop
    loop.epoch_loop.__class__ = lightning_loops.EpochLoop
    loop.restarting = True
    assert loop.restarting
    loop.unset_restarting()
    assert not loop.restarting
    for _ in range(2):
        loops = lightning_loops.restore_lightning_classes(trainer)
    assert [type(each) for each in loops] == classes
    assert set(vars(loop.epoch_loop)) == attributes
