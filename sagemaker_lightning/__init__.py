"""The runtime's public names: SageMaker jobs by Lightning that survive interruptions.

The names below are imported when they are first used: `import sagemaker_lightning` imports neither
torch nor Lightning. From then on, `lightning.pytorch` and `pytorch_lightning` are two names of the
same modules (compat/namespaces.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sagemaker_lightning.compat import namespaces

if TYPE_CHECKING:  # what `__getattr__` gives; test_package.py compares it with PUBLIC
    from sagemaker_lightning.callbacks.divergence import Divergence as Divergence
    from sagemaker_lightning.callbacks.gradient_weighting import (
        GradientWeighting as GradientWeighting,
    )
    from sagemaker_lightning.callbacks.heartbeat import Heartbeat as Heartbeat
    from sagemaker_lightning.callbacks.host_metrics import HostMetrics as HostMetrics
    from sagemaker_lightning.callbacks.loggers.tensorboard_events import Logger as Logger
    from sagemaker_lightning.callbacks.lr_scaling import LearningRateScaling as LearningRateScaling
    from sagemaker_lightning.callbacks.progress import LogProgress as LogProgress
    from sagemaker_lightning.callbacks.rank_consistency import RankConsistency as RankConsistency
    from sagemaker_lightning.cli.application import Application as Application
    from sagemaker_lightning.cli.lr_schedules import Triangle as Triangle
    from sagemaker_lightning.cli.run import SageMakerCLI as SageMakerCLI
    from sagemaker_lightning.contract.environment import (
        SageMakerEnvironment as SageMakerEnvironment,
    )
    from sagemaker_lightning.contract.errors import UserError as UserError
    from sagemaker_lightning.contract.rendezvous import join_hosts as join_hosts
    from sagemaker_lightning.contract.reporting import report_failures as report_failures
    from sagemaker_lightning.data.deterministic import make_deterministic as make_deterministic
    from sagemaker_lightning.data.seeding import Seeding as Seeding
    from sagemaker_lightning.resume.callback import ExactResume as ExactResume
    from sagemaker_lightning.resume.files.best_model import BestModel as BestModel
    from sagemaker_lightning.shards.dataset import ShardedDataset as ShardedDataset
    from sagemaker_lightning.shards.order import ShardBatches as ShardBatches

namespaces.register()

__version__ = "0.2.0"

PUBLIC = {
    "Application": "cli.application",
    "SageMakerCLI": "cli.run",
    "SageMakerEnvironment": "contract.environment",
    "UserError": "contract.errors",
    "join_hosts": "contract.rendezvous",
    "report_failures": "contract.reporting",
    "ExactResume": "resume.callback",
    "BestModel": "resume.files.best_model",
    "Seeding": "data.seeding",
    "make_deterministic": "data.deterministic",
    "ShardedDataset": "shards.dataset",
    "ShardBatches": "shards.order",
    "Heartbeat": "callbacks.heartbeat",
    "RankConsistency": "callbacks.rank_consistency",
    "GradientWeighting": "callbacks.gradient_weighting",
    "LearningRateScaling": "callbacks.lr_scaling",
    "Divergence": "callbacks.divergence",
    "LogProgress": "callbacks.progress",
    "HostMetrics": "callbacks.host_metrics",
    "Logger": "callbacks.loggers.tensorboard_events",
    "Triangle": "cli.lr_schedules",
}
"""The public names, and the modules that have them."""

__all__ = [*PUBLIC, "__version__"]  # noqa: PLE0604  (names alone)


if not TYPE_CHECKING:  # a type checker would believe that it has any name

    def __getattr__(name: str) -> object:
        if name not in PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not PUBLIC[name].startswith("contract."):  # all others need Lightning
            import_module(f"{__name__}.compat.versions").check()
        value = globals()[name] = getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
        if name == "ExactResume":
            # A resumed run that differs says why, by a search that is not part of the training.
            import_module(f"{__name__}.drill.causes").register()
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
