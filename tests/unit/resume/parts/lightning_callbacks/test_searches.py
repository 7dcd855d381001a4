"""What searches have found is kept, and they do not search again."""

from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from pytorch_lightning.tuner.lr_finder import _LRFinder
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
    found = {name: results.pop(name) for name in [*results] if name.startswith("callback ")}
    assert results == {"learning_rate": 0.5, "batch_size": 4, "mine": 0.25}
    assert [*found.values()] == [{}, {"optimal_batch_size": 2}, {}, {}]
    model.lr = 0.125
    assert results_of(model, rates)["lr"] == 0.125
    assert results_of(model, Callback()) == {}


def test_a_callback_knows_what_its_search_has_found():
    found = _LRFinder("linear", 0.5, 1.0, 3)
    found.results = {"lr": [0.5, 0.6, 0.7, 0.8], "loss": [4.0, 3.0, 1.0, 2.0]}
    assert (suggestion := found.suggestion(skip_begin=0, skip_end=1))
    rates, sizes = LearningRateFinder(), BatchSizeFinder()
    rates.optimal_lr, sizes.optimal_batch_size = found, 8
    saved = results_of(LightningModule(), rates, sizes)
    rates, sizes = LearningRateFinder(), BatchSizeFinder()
    trainer = in_epoch_5(lightning_module=LightningModule(), callbacks=[rates, sizes])
    run_of(trainer).part(SearchResults).restore(saved, Moment.LOADING)
    assert vars(rates.optimal_lr) == vars(found) and sizes.optimal_batch_size == 8
    assert rates.optimal_lr.suggestion(skip_begin=0, skip_end=1) == suggestion
    found.results["fig"] = object()
    rates.optimal_lr = found
    assert "callback 0" not in results_of(LightningModule(), rates)


def test_no_more_is_taken_than_a_search_finds():
    rates, sizes = LearningRateFinder(), BatchSizeFinder()
    trainer = in_epoch_5(lightning_module=LightningModule(), callbacks=[rates, sizes])
    forged = {"results": {}, "suggestion": 5, 5: 5}, {"optimal_batch_size": "8"}
    for found in (forged, ({"lr_min": 1.0}, {}), (5, 5)):
        saved = {f"callback {number}": each for number, each in enumerate(found)}
        run_of(trainer).part(SearchResults).restore(saved, Moment.LOADING)
        assert type(sizes.optimal_batch_size) in (int, type(None)) and callable(
            rates.optimal_lr.suggestion
        )


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
