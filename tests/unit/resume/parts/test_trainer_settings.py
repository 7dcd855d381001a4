"""Lightning's settings that a callback changes while training."""

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from short_fits import Noted, as_in_a_new_process, interrupted, trainer, weights
from user_state import Model, state_of

from sagemaker_lightning.resume.parts.trainer_settings import HAS_VALIDATED

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


def settings_of(state) -> dict:
    """Return the settings that are saved, but for what is always saved."""
    saved = state.encode_changes()["trainer_settings"]
    return {name: value for name, value in saved.items() if name != HAS_VALIDATED}


def test_settings_that_change_are_saved_from_then_on():
    state = state_of()
    loop = state.trainer.fit_loop
    assert settings_of(state) == {}
    state.trainer.accumulate_grad_batches = 4
    state.trainer.limit_val_batches = 1  # 1.0 before: all of them
    loop.min_epochs = loop.epoch_loop.min_steps = 2
    state.trainer.lightning_module.automatic_optimization = False
    loop.max_epochs = loop.epoch_loop.max_steps = 7
    state.trainer.should_stop = True
    state.trainer._default_root_dir = "/elsewhere"
    saved = state.encode_changes()
    assert saved["trainer_settings"] == {
        HAS_VALIDATED: False,
        "accumulate_grad_batches": 4,
        "limit_val_batches": 1,
        "fit_loop.min_epochs": 2,
        "fit_loop.epoch_loop.min_steps": 2,
        "model.automatic_optimization": False,
    }
    other = state_of()
    other.restore(saved)
    assert type(other.trainer.limit_val_batches) is int and other.trainer.limit_val_batches == 1
    assert other.trainer.fit_loop.min_epochs == 2
    assert not other.trainer.lightning_module.automatic_optimization
    assert other.encode_changes()["trainer_settings"] == saved["trainer_settings"]
    other.trainer.accumulate_grad_batches = 1
    assert settings_of(other)["accumulate_grad_batches"] == 1


class Patient(EarlyStopping):
    """A user's class of Lightning's."""


@pytest.mark.parametrize("class_", [EarlyStopping, Patient])
def test_settings_of_lightnings_callbacks_come_back(class_):
    """What their `state_dict` has, Lightning loads; a text may be a path."""

    def made():
        callbacks = class_("loss"), ModelCheckpoint(monitor="loss", save_top_k=2)
        return state_of(Model(), *callbacks, enable_checkpointing=True), *callbacks

    state, stopping, best = made()
    assert settings_of(state) == {}
    stopping.min_delta, stopping.wait_count, best.save_top_k = 9.0, 2, 4
    stopping.monitor = best.best_model_path = "other"
    saved = state.encode_changes()
    names = [name.partition(" ")[2] for name in settings_of(state)]
    assert names == [f"{class_.__name__}.min_delta", "ModelCheckpoint.save_top_k"]
    other, stopping, best = made()
    other.restore(saved)
    assert (stopping.min_delta, stopping.wait_count, best.save_top_k) == (9.0, 0, 4)


def test_what_is_added_to_loops_is_saved_as_what_is_added_to_the_trainer():
    state = state_of()
    loop = state.trainer.fit_loop
    loop.epoch_loop.seen = 1
    state.run.mark_start()
    loop.epoch_loop.seen = 2
    loop.epoch_loop.manual_optimization._steps = loop.epoch_loop.val_loop.losses = [0.5]
    state.trainer.losses = loop.epoch_loop.val_loop.losses
    saved = state.encode_changes()
    other = state_of()
    other.restore(saved)
    restored = other.trainer.fit_loop.epoch_loop
    assert restored.seen == 2 and restored.manual_optimization._steps == [0.5]
    assert restored.val_loop.losses is restored.manual_optimization._steps is other.trainer.losses


def test_a_setting_that_a_model_calculates_is_left_alone():
    class Alternating(Model):
        epoch = 0

        @property
        def automatic_optimization(self):
            return self.epoch == 0

    state = state_of(Alternating())
    state.trainer.lightning_module.epoch = 1
    assert settings_of(state) == {}


def test_another_number_of_ranks_has_its_own_number_of_batches():
    state = state_of()
    state.trainer.val_check_batch = state.trainer.fit_loop.max_batches = 3
    state.run.mark_start()
    state.trainer.val_check_batch = state.trainer.fit_loop.max_batches = 4
    state.trainer.log_every_n_steps = 5
    saved = state.encode_changes()
    for same_ranks in (True, False):
        other = state_of()
        other.trainer.val_check_batch = other.trainer.fit_loop.max_batches = 2
        other.restore(saved, same_ranks=same_ranks)
        expected = 4 if same_ranks else 2
        assert other.trainer.val_check_batch == other.trainer.fit_loop.max_batches == expected
        assert other.trainer.log_every_n_steps == 5


class Limiting(pl.Callback):
    """Sets other limits of batches, which count for the data that are made next."""

    def on_train_epoch_end(self, trainer, model):
        trainer.limit_train_batches = 3 if trainer.current_epoch == 0 else 2
        trainer.limit_val_batches = 1 if trainer.current_epoch == 1 else 1.0


@pytest.mark.parametrize(
    ("stop", "every"), [("batch 2:1", 1), ("end 2", 2), ("validation 3:0", 2), ("batch 4:1", 0)]
)
def test_limits_of_batches_hold_for_the_data_they_were_made_with(tmp_path, stop, every):
    def fitted(folder, **moments):
        as_in_a_new_process()
        options = {"max_epochs": 5, "reload_dataloaders_every_n_epochs": every, "strict": True}
        fits = trainer(tmp_path / folder, Limiting(), **options)
        model = Noted(**moments)
        fits.fit(model)
        return weights(model), model.validated, model.events[-12:]

    alone = fitted("alone")
    with interrupted():
        fitted("run", stop=stop)
    assert fitted("run") == alone
