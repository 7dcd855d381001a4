"""What a checkpoint has: how each part of it is saved and comes back.

A part says its key, what it holds, where it is, when it is restored, and how it is compared. A file
of this package has one part, or a few that belong together, or what several parts use. To find what
becomes of a thing, look for it in PARTS.
"""

from sagemaker_lightning.resume.parts.before_hooks import BeforeHooks
from sagemaker_lightning.resume.parts.buffer_sync import BufferSync
from sagemaker_lightning.resume.parts.counters import Counters
from sagemaker_lightning.resume.parts.data_epoch import DataEpoch
from sagemaker_lightning.resume.parts.data_identity import DataIdentity, Structure
from sagemaker_lightning.resume.parts.epoch_position import EpochPosition
from sagemaker_lightning.resume.parts.epoch_sums import EpochSums
from sagemaker_lightning.resume.parts.generators import Generators
from sagemaker_lightning.resume.parts.given_parts import GivenParts
from sagemaker_lightning.resume.parts.gradients import Gradients
from sagemaker_lightning.resume.parts.lightning_callbacks.learning_rates import NotedRates
from sagemaker_lightning.resume.parts.lightning_callbacks.model_checkpoint import (
    LastSaved,
    ModelFiles,
)
from sagemaker_lightning.resume.parts.lightning_callbacks.searches import SearchResults
from sagemaker_lightning.resume.parts.lightning_callbacks.states import Callbacks
from sagemaker_lightning.resume.parts.lightning_callbacks.throughput import ThroughputCounts
from sagemaker_lightning.resume.parts.lightning_callbacks.weight_averaging import AveragingState
from sagemaker_lightning.resume.parts.limits import Limits
from sagemaker_lightning.resume.parts.loader_positions import LoaderPositions
from sagemaker_lightning.resume.parts.logger_positions import LoggerPositions
from sagemaker_lightning.resume.parts.metrics import Metrics
from sagemaker_lightning.resume.parts.modes import Modes
from sagemaker_lightning.resume.parts.newest_metrics import NewestMetrics
from sagemaker_lightning.resume.parts.optimizers import OptimizerClasses, Optimizers, Schedulers
from sagemaker_lightning.resume.parts.parameter_groups import ParameterGroups
from sagemaker_lightning.resume.parts.part import Part
from sagemaker_lightning.resume.parts.pruned_weights import SharedPrunedWeights
from sagemaker_lightning.resume.parts.rank_buffers import RankBuffers
from sagemaker_lightning.resume.parts.should_stop import ShouldStop
from sagemaker_lightning.resume.parts.stateful_objects import StatefulObjects
from sagemaker_lightning.resume.parts.trainer_settings import TrainerSettings
from sagemaker_lightning.resume.parts.user_objects import UserObjects
from sagemaker_lightning.resume.parts.weights import Weights

PARTS: tuple[type[Part], ...] = (
    LoaderPositions,
    EpochPosition,
    BeforeHooks,
    Weights,
    SharedPrunedWeights,
    OptimizerClasses,
    Optimizers,
    ParameterGroups,
    Schedulers,
    AveragingState,
    Callbacks,
    ModelFiles,
    LastSaved,
    SearchResults,
    ThroughputCounts,
    NotedRates,
    Limits,
    Counters,
    ShouldStop,
    NewestMetrics,
    RankBuffers,
    BufferSync,
    Metrics,
    EpochSums,
    Gradients,
    UserObjects,
    Generators,
    StatefulObjects,
    TrainerSettings,
    Modes,
    GivenParts,
    DataEpoch,
    DataIdentity,
    Structure,
    LoggerPositions,
)
"""What a checkpoint has, in the order in which it is restored and compared."""
