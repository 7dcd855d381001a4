"""The values of parameter groups, which hooks at the start may change."""

from types import SimpleNamespace

from untrained import in_epoch_5, run_of

from sagemaker_lightning.resume.parts.optimizers import (
    Optimizers,
    Schedulers,
    restore_group_values,
)


def test_values_of_groups_are_given_back():
    optimizers = [
        SimpleNamespace(param_groups=[{"lr": 1.0, "params": "x"}, {"lr": 2.0}]),
        SimpleNamespace(param_groups=[{"lr": 3.0}]),
    ]
    saved = [[{"lr": 0.1}, {"lr": 0.2}], [{"lr": 0.3, "momentum": 0.5}, {"lr": 9.0}], [{"lr": 7.0}]]
    restore_group_values(SimpleNamespace(optimizers=optimizers), saved)
    assert [optimizer.param_groups for optimizer in optimizers] == [
        [{"lr": 0.1, "params": "x"}, {"lr": 0.2}],
        [{"lr": 0.3, "momentum": 0.5}],
    ]


def test_each_value_of_a_state_is_compared():
    """Of optimizers and of schedulers."""
    strategy = SimpleNamespace(optimizer_state=lambda optimizer: {"state": {0: {"step": 1}}})
    scheduler = SimpleNamespace(state_dict=lambda: {"last_epoch": 3})
    run = run_of(
        in_epoch_5(
            strategy=strategy,
            optimizers=["a", "b"],
            lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)],
        )
    )
    of_optimizers, of_schedulers = run.part(Optimizers), run.part(Schedulers)
    assert of_optimizers.digest(of_optimizers.present(), {}) == {
        "optimizer_states.0.state.0.step": 1,
        "optimizer_states.1.state.0.step": 1,
    }
    assert of_schedulers.digest(of_schedulers.present(), {}) == {"lr_schedulers.0.last_epoch": 3}
