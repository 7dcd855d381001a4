"""The states of the loaders are taken once, for the epoch that they are of."""

from types import SimpleNamespace

from untrained import in_epoch_5, resumed, run_of

from sagemaker_lightning.compat.torch_data import iterations_begun
from sagemaker_lightning.resume.parts.loader_positions import LoaderPositions
from sagemaker_lightning.resume.parts.part import Moment
from sagemaker_lightning.resume.resume_point import ResumePoint

SAVED = {"a": 1, "generators": {}, "validation iterations": []}


def test_the_states_of_loaders_are_taken_once():
    """Those of an epoch's end are restored before the hooks of the next one change them."""
    given = []
    trainer = in_epoch_5()
    trainer.fit_loop._combined_loader = SimpleNamespace(give_back=given.append)
    for point in (ResumePoint.EPOCH, ResumePoint.BATCH):
        run = resumed(run_of(trainer), point, loader_positions=SAVED)
        run.part(LoaderPositions).restore(SAVED, Moment.TRAINING)
        assert given == [SAVED]
        assert run.part(LoaderPositions).take() == SAVED
        assert run.part(LoaderPositions).take() is None
    run = resumed(run_of(trainer), ResumePoint.EPOCH, loader_positions=SAVED)
    run.part(LoaderPositions).discard()
    run.part(LoaderPositions).restore(SAVED, Moment.TRAINING)
    assert given == [SAVED] and run.part(LoaderPositions).take() is None
    assert run_of(trainer).part(LoaderPositions).take() is None


class OfLitdata:
    """A loader that shuffles by the number of its iteration."""

    __module__ = "litdata.streaming.dataloader"
    current_epoch = 0


class OfStreaming:
    """A dataset that does so for its loader."""

    __module__ = "streaming.base.dataset"
    next_epoch = 0


def test_validation_loaders_begin_the_iteration_that_comes_next():
    """Also after a check before training, which a resumed run may have once more."""
    trainer = in_epoch_5()
    plain, counting = SimpleNamespace(current_epoch=0), OfLitdata()
    loaders = [plain, counting, SimpleNamespace(dataset=OfStreaming())]
    trainer.val_dataloaders = loaders
    saved = {**SAVED, "validation iterations": [3, 4, 5], "validation draws": []}
    part = resumed(run_of(trainer), ResumePoint.BATCH, loader_positions=saved).part(LoaderPositions)
    for restore in (part.validation_data_made, lambda: part.restore(saved, Moment.TRAINING)):
        counting.current_epoch = loaders[2].dataset.next_epoch = 0
        restore()
        begun = plain.current_epoch, counting.current_epoch, loaders[2].dataset.next_epoch
        assert begun == (0, 4, 5)
    assert [iterations_begun(each) for each in loaders] == [None, 4, 5]


def test_each_rank_has_its_own_states():
    """Another number of ranks has those of rank 0."""
    ranks = [{"loader_positions": rank} for rank in (0, 1)]
    for world_size, expected in ((2, 1), (3, 0)):
        trainer = in_epoch_5(world_size=world_size, global_rank=1)
        run = resumed(run_of(trainer), world_size=2, ranks=ranks)
        assert run.part(LoaderPositions).take() == expected
