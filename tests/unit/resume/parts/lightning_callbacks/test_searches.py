"""What searches have found is kept, and they do not search again."""

from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from untrained import in_epoch_5, run_of

from sagemaker_lightning.resume.parts.lightning_callbacks.searches import (
    SearchResults,
    search_again,
)
from sagemaker_lightning.resume.parts.part import Moment


def results_of(model: LightningModule, *callbacks: Callback) -> dict:
    """Return what is saved."""
    trainer = in_epoch_5(lightning_module=model, callbacks=list(callbacks))
    return run_of(trainer).part(SearchResults).save(None, None)


def test_the_results_of_searches_are_kept():
    model = LightningModule()
    model.learning_rate = 0.5
    model.batch_size = 4
    model.mine = 0.25
    rates, sizes, own = (
        LearningRateFinder(),
        BatchSizeFinder(),
        LearningRateFinder(attr_name="mine"),
    )
    none = LearningRateFinder(attr_name="absent")
    results = results_of(model, Callback(), rates, sizes, own, none)
    assert results == {"learning_rate": 0.5, "batch_size": 4, "mine": 0.25}
    model.lr = 0.125
    assert results_of(model, rates) == {"lr": 0.125}
    assert results_of(model, Callback()) == {}


def test_a_search_that_is_done_is_not_done_again_in_this_training():
    model = LightningModule()
    model.lr = 0.5
    search, other = LearningRateFinder(), Callback()
    trainer = in_epoch_5(lightning_module=model, callbacks=[search, other])
    run_of(trainer).part(SearchResults).restore({"lr": 0.25}, Moment.LOADING)
    assert model.lr == 0.25 and search.on_fit_start(trainer, model) is None
    assert "on_fit_start" not in vars(other)
    other.on_fit_start = own = print
    search_again(trainer)
    assert "on_fit_start" not in vars(search) and other.on_fit_start is own
    search_again(trainer)
