"""The entries of a checkpoint that are ours: their names and types.

A checkpoint is input: what reads one compares first what it relies on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from sagemaker_lightning.state.graph.text import Record


class TensorForm(TypedDict):
    """How ranks share a tensor out."""

    shape: list[int]
    dtype: str
    """Its name in torch, such as "float32"."""
    layout: list[list[str]]
    """For each dimension of the mesh, its name and how the tensor is placed there."""
    chunks: list[list[list[int]] | None]
    """For each rank, the offsets and the sizes of its part; None if it does not have the tensor."""


class Shards(TypedDict):
    """What a checkpoint says of its shards."""

    tensors: dict[str, TensorForm]
    """The tensors that are shared out, by name."""
    checksums: NotRequired[list[str]]
    """The SHA-256 of each rank's shard, in hexadecimal; the ranks write the shards first."""


class CommonEntries(TypedDict):
    """The entries of each file that may have shards."""

    step: int
    """The optimizer step."""
    number: int
    """The number of the save."""
    world_size: int
    """Number of ranks."""
    mesh: NotRequired[list[int]]
    """The sizes of the mesh of a sharded model's ranks."""
    shards: NotRequired[Shards]


class RankOverrides(TypedDict):
    """Those of Lightning's entries that are others on a rank than on rank 0."""

    entries: dict[str, Any]
    exact_values: Mapping[str, Record]


class ResumeResult(TypedDict):
    """The result of a resume, as model.json has it."""

    step: int
    """The optimizer step of the checkpoint."""
    identical: bool | None
    """Whether all that was compared was identical; None if nothing could be compared."""
    steps: int
    """Optimizer steps that were identical."""
    said: str


class OptimizerArguments(TypedDict):
    """What `configure_optimizers` has made, in plain values."""

    optimizers: list[str]
    """The names of the optimizers' classes."""
    schedulers: list[str]
    """The names of the schedulers' classes."""
    arguments: dict[str, str]
    """The optimizers' arguments as text, by name."""
    schedule: dict[str, str]
    """The schedulers' arguments as text, by name."""
    functions: dict[str, str]
    """Hashes of the user's own functions that decide a learning rate, by name."""
    python: int
    """The version of Python: another one has other code of the same function."""


class LoaderNumbers(TypedDict):
    """Numbers of the training loaders; an entry is None if it is unknown."""

    sizes: list[int | None]
    """The batch size of a rank, for each training loader and the data module."""
    workers: list[int | None]
    """The number of data workers, for each training loader."""


class RunSettings(LoaderNumbers):
    """The settings that identify a run."""

    flags: str
    """The settings by flag, as JSON."""
    data: str
    """Names the training data."""
    ranks: int
    """Number of ranks."""


class RunDescription(RunSettings):
    """What a checkpoint says of its run."""

    shapes: Mapping[str, list[int] | None]
    """The shapes of the weights and buffers; None for a lazy one."""
    optimizers: OptimizerArguments
    numbers: Mapping[str, str] | None
    """The numbers that the code gives; None if they are not known."""


class Entries(CommonEntries):
    """The entries of a checkpoint to resume from."""

    resume_point: str
    """A ResumePoint's value."""
    seed: int
    run: RunDescription
    """What SameRun.describe returned."""
    journal: bytes
    """Identifies the run, and so its journals."""
    epoch_batches: NotRequired[int]
    """The number of batches of an epoch; not there if nobody knows it."""
    resumes: Sequence[ResumeResult]
    exact_values: Mapping[str, Record]
    """Those of Lightning's values that are not plain."""
    parts: Mapping[str, Any]
    """The parts of the run, by key."""
    ranks: Sequence[Mapping[str, Any]]
    """The parts of each rank, by key, and its RankOverrides as "rank_overrides"."""
