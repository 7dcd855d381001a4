"""What a run that resumes where it was changes in this process, until it ends."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from pytorch_lightning import LightningModule

from sagemaker_lightning.compat import torch_compile
from sagemaker_lightning.compat.lightning_callbacks import calling_hooks_directly
from sagemaker_lightning.compat.lightning_trainer import leaving_signals
from sagemaker_lightning.compat.random_generators import entropy_replaced
from sagemaker_lightning.contract.shutdown import stops_training
from sagemaker_lightning.data.seeded_indices import unseeded
from sagemaker_lightning.state.graph.kinds import draws


@contextmanager
def process_changes() -> Iterator[None]:
    """Draw and compile as a resumed run does, and leave the signals to ExactResume."""
    with ExitStack() as changes:
        changes.enter_context(entropy_replaced(unseeded.bits))
        changes.enter_context(draws.watching())
        changes.enter_context(torch_compile.compile_each_shape())
        changes.enter_context(calling_hooks_directly())
        changes.enter_context(leaving_signals(stops_training))
        yield


@contextmanager
def unoptimized_scripts(model: LightningModule) -> Iterator[None]:
    """Run modules of torch.jit as they are written, if the model has some.

    They are optimized by what their first runs were like: a resumed run has first runs again.
    """
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]  # public
            yield
    else:
        yield
