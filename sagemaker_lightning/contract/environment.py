"""The one reader of `SM_*` and of the files in /opt/ml/input/config.

The SageMaker training toolkit exports the `SM_*` variables to the program it runs (aws/sagemaker-training-toolkit,
README, "Environment variables"). `Environment.read` turns them into one typed value that the rest of the
application is handed; outside SageMaker, where there are none, the defaults below hold.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sagemaker_lightning.contract import job_config
from sagemaker_lightning.contract.errors import UserError

# SDK 3's ModelTrainer ships the job's source and its own drivers as channels: they are no training data.
CODE_CHANNELS = {"code", "sm_drivers"}
GROUPS = "SM_INSTANCE_GROUPS_DICT"
DRILL = "SAGEMAKER_LIGHTNING_DRILL"
RANKS = {"RANK": "rank", "LOCAL_RANK": "local rank"}  # torchrun sets both, Lightning the second


@dataclass(frozen=True)
class Environment:
    """What SageMaker tells a training container, or what takes its place on a desk."""

    hosts: tuple[str, ...] = ("localhost",)
    """The hosts that train, as SageMaker sorts them (by text: algo-1, algo-10, algo-2): all of the job, or those of
    the instance groups that carry the distribution. The first is the main one."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The hosts of each instance group by its name; none in a job without groups."""
    current_host: str = "localhost"
    """This host; not one of `hosts` if its instance group takes no part in the training."""
    num_gpus: int = 0
    """GPUs of this host that the toolkit counted."""
    network_interface: str | None = None
    """The network interface between the hosts, as SageMaker names it: this machine may have none of that name."""
    channels: Mapping[str, Path] = field(default_factory=dict)
    """Input folder of each data channel by name, the code channels of SDK 3 left out."""
    sharded_channels: frozenset[str] = frozenset()
    """The channels of which each host has other files than the others (ShardedByS3Key)."""
    model_dir: Path = Path("output/model")
    """Where the trained model goes; SageMaker uploads it as model.tar.gz."""
    output_data_dir: Path = Path("output/data")
    """Where logs go; SageMaker uploads it as output.tar.gz."""
    checkpoint_dir: Path = Path("output/data/checkpoints")
    """Where checkpoints go: the job's checkpoint folder if it has one, else below `output_data_dir`."""
    revision: str = "unknown"
    """Commit that the image was built from."""
    user_args: tuple[str, ...] | None = None
    """The command line that the toolkit made of the hyperparameters, which loses some of them."""
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    """The job's hyperparameters as they were sent."""
    rendezvous_timeout: float = 50.0
    """Seconds that a host may take to have a name and to answer."""
    peer_timeout: float = 60.0
    """Seconds within which all ranks end when one is lost."""
    torchrun: tuple[int, int] | None = None
    """Ranks of this node and of all, where torchrun started this process."""
    watch: Path | None = None
    """Where this node's watch (nodes/watchdog.py) listens to its ranks, if there is one."""
    drill: Mapping | None = None
    """What drill/command.py asks of a run that it drills (drill/drilled_run.py)."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "Environment":
        """Return the environment that `variables` describe; UserError names the variable that contradicts itself."""
        everyone = tuple(_json(variables, "SM_HOSTS", list, list(cls.hosts)))
        current_host = variables.get("SM_CURRENT_HOST", everyone[0] if len(everyone) == 1 else "")
        if current_host not in everyone:
            raise UserError(
                f"SM_CURRENT_HOST: found {current_host!r}, allowed is one of SM_HOSTS: {', '.join(everyone)}"
            )
        output_data_dir = Path(variables.get("SM_OUTPUT_DATA_DIR", cls.output_data_dir))
        return cls(
            hosts=_training_hosts(variables) or everyone,
            groups={
                key: tuple(one["hosts"]) for key, one in _json(variables, GROUPS, dict, {}).items()
            },
            current_host=current_host,
            num_gpus=_json(variables, "SM_NUM_GPUS", int, 0),
            network_interface=variables.get("SM_NETWORK_INTERFACE_NAME"),
            channels=_channels(variables),
            sharded_channels=_sharded_channels(variables),
            model_dir=Path(variables.get("SM_MODEL_DIR", cls.model_dir)),
            output_data_dir=output_data_dir,
            checkpoint_dir=_checkpoint_dir(variables) or output_data_dir / "checkpoints",
            revision=variables.get("SAGEMAKER_LIGHTNING_REVISION") or cls.revision,
            user_args=tuple(_json(variables, "SM_USER_ARGS", list, ()))
            if "SM_USER_ARGS" in variables
            else None,
            hyperparameters=_hyperparameters(variables),
            rendezvous_timeout=_seconds(
                variables, "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT", cls.rendezvous_timeout
            ),
            peer_timeout=_seconds(variables, "SAGEMAKER_LIGHTNING_PEER_TIMEOUT", cls.peer_timeout),
            torchrun=_torchrun(variables),
            watch=watch(variables),
            drill=_json(variables, DRILL, dict, None),
        )

    @property
    def log_dir(self) -> Path:
        """Folder of this host's logs; in a job with a folder for checkpoints, there: it outlives interruptions."""
        output, checkpoints = self.output_data_dir, self.checkpoint_dir
        return (
            (output if checkpoints.is_relative_to(output) else checkpoints)
            / "tensorboard"
            / self.current_host
        )

    @property
    def takes_part(self) -> bool:
        """Whether this host is one of those that train."""
        return self.current_host in self.hosts

    @property
    def num_nodes(self) -> int:
        """Number of nodes that train; torchrun may have been started by hand, on hosts that SageMaker does not know."""
        return self.torchrun[1] // self.torchrun[0] if self.torchrun else len(self.hosts)

    @property
    def training_dir(self) -> Path | None:
        """Folder of the channel `training`, or of the only channel there is; None if that leaves none or a choice."""
        return self.channels.get(self._training_channel)

    @property
    def training_is_sharded(self) -> bool:
        """Whether `training_dir` holds a part of the training data, and other hosts have the rest."""
        return len(self.hosts) > 1 and self._training_channel in self.sharded_channels

    @property
    def _training_channel(self) -> str:
        return (
            "training"
            if "training" in self.channels or len(self.channels) != 1
            else next(iter(self.channels))
        )


def failure_file(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file that becomes the job's FailureReason, None outside SageMaker; apart, as reading may fail."""
    return Path(variables["SM_OUTPUT_DIR"], "failure") if "SM_OUTPUT_DIR" in variables else None


def watch(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return the socket on which this node's watch listens to its ranks, None where there is none; apart, too."""
    return (
        Path(variables["SAGEMAKER_LIGHTNING_WATCH"])
        if "SAGEMAKER_LIGHTNING_WATCH" in variables
        else None
    )


def drilled(variables: Mapping[str, str], base: Path, asked: Mapping) -> dict[str, str]:
    """Return `variables` for a run whose model, logs and checkpoints go below `base`, which takes the place of /opt/ml,
    whatever launches it; `asked` becomes its `Environment.drill`."""
    moved = {
        "SAGEMAKER_BASE_DIR": str(base),
        "SM_MODEL_DIR": str(base / "model"),
        "SM_OUTPUT_DATA_DIR": str(base / "output/data"),
        "SM_CHECKPOINT_DIR": str(base / "checkpoints"),
    }
    others = (
        "SM_OUTPUT_DIR",
        "SAGEMAKER_LIGHTNING_WATCH",
    )  # of the job, if any, in which this is run
    kept = {name: value for name, value in variables.items() if name not in others}
    return kept | moved | {DRILL: json.dumps(asked)}


def place(variables: Mapping[str, str] = os.environ) -> str:
    """Return the host and rank of this process, for messages; the rank on this host where only that is known."""
    rank = next(
        (f"{words} {variables[key]}" for key, words in RANKS.items() if key in variables),
        "local rank 0",
    )
    return f"host {variables.get('SM_CURRENT_HOST', 'localhost')}, {rank}"


def _json(variables: Mapping[str, str], name: str, kind: type, default):
    """Return variable `name` decoded, a JSON value of type `kind` and no empty list, or `default` if it is not set."""
    if name not in variables:
        return default
    try:
        value = json.loads(variables[name])
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, kind) or (value == [] and default):
        raise UserError(
            f"{name}: found {variables[name]!r}, allowed is a JSON {kind.__name__}, not empty"
        )
    return value


def _torchrun(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (LOCAL_WORLD_SIZE, WORLD_SIZE); the former is torchrun's own, Lightning sets the latter, too."""
    if "LOCAL_WORLD_SIZE" not in variables:
        return None
    return _json(variables, "LOCAL_WORLD_SIZE", int, 1), _json(variables, "WORLD_SIZE", int, 1)


def _seconds(variables: Mapping[str, str], name: str, default: float) -> float:
    """Return variable `name` as seconds, or `default` if it is not set."""
    try:
        value = float(variables.get(name, default))
    except ValueError:
        value = 0
    if not 1 <= value < 1e6:  # nan is not
        raise UserError(
            f"{name}: found {variables[name]!r}, allowed is a number of seconds, 1 or more"
        )
    return value


def _training_hosts(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the instance groups that a heterogeneous job's distribution names; none if it names none.

    SM_DISTRIBUTION_INSTANCE_GROUPS will not do: where the job names no group, it is whichever this host is in.
    """
    sent = _json(variables, "SM_FRAMEWORK_PARAMS", dict, {})
    named = sent.get("sagemaker_distribution_instance_groups") or []
    named = [named] if isinstance(named, str) else named
    groups = _json(variables, GROUPS, dict, {})
    if wrong := [name for name in named if name not in groups] if groups else []:
        raise UserError(
            f"sagemaker_distribution_instance_groups: found {wrong[0]!r}, allowed are the groups: {', '.join(groups)}"
        )
    return tuple(sorted(host for name in named if name in groups for host in groups[name]["hosts"]))


def _channels(variables: Mapping[str, str]) -> dict[str, Path]:
    """Return the folder of each channel in SM_CHANNELS that is data; the toolkit upper-cases names and nothing more."""
    names = _json(variables, "SM_CHANNELS", list, [])
    if not names:  # a desk without the toolkit: SM_CHANNEL_TRAINING alone is enough
        names = [
            key.removeprefix("SM_CHANNEL_").lower()
            for key in variables
            if key.startswith("SM_CHANNEL_")
        ]
    missing = [name for name in names if f"SM_CHANNEL_{name.upper()}" not in variables]
    if missing:
        raise UserError(
            f"SM_CHANNELS names {missing[0]!r}, but SM_CHANNEL_{missing[0].upper()} is not set"
        )
    return {
        name: Path(variables[f"SM_CHANNEL_{name.upper()}"])
        for name in sorted(names)
        if name not in CODE_CHANNELS
    }


def _sharded_channels(variables: Mapping[str, str]) -> frozenset[str]:
    """Return the channels that SM_INPUT_DATA_CONFIG, the toolkit's copy of inputdataconfig.json, calls sharded."""
    config = _json(variables, "SM_INPUT_DATA_CONFIG", dict, {})
    kinds = {
        name: entry.get("S3DistributionType")
        for name, entry in config.items()
        if isinstance(entry, dict)
    }
    return frozenset(name for name, kind in kinds.items() if kind == "ShardedByS3Key")


def _hyperparameters(variables: Mapping[str, str]) -> dict[str, object]:
    """Return the content of hyperparameters.json; SM_HPS has lost what a number's text was."""
    file = Path(variables.get("SM_INPUT_CONFIG_DIR", "/nonexistent"), "hyperparameters.json")
    return job_config.read(file) if file.is_file() else {}


def _checkpoint_dir(variables: Mapping[str, str]) -> Path | None:
    """Return the job's checkpoint folder, if it has one: of checkpointconfig.json, or /opt/ml/checkpoints, if it is
    there. SageMaker sets no variable for it; SM_CHECKPOINT_DIR is for whoever wants to say so by hand."""
    if "SM_CHECKPOINT_DIR" in variables:
        return Path(variables["SM_CHECKPOINT_DIR"])
    config = Path(variables.get("SM_INPUT_CONFIG_DIR", "/nonexistent"), "checkpointconfig.json")
    if config.is_file():
        return Path(job_config.checkpoint_path(config))
    folder = Path(variables.get("SM_MODEL_DIR", "/nonexistent/model")).parent / "checkpoints"
    return folder if folder.is_dir() else None
