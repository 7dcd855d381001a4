"""Reads the `SM_*` variables and the files in /opt/ml/input/config.

No other module reads these variables. The SageMaker training toolkit exports them to the program
that it runs (aws/sagemaker-training-toolkit, README, "Environment variables").
`SageMakerEnvironment.read` turns them into one typed value, which the rest of the application gets.
Outside SageMaker there are no such variables, and the defaults below hold.
"""

import json
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagemaker_lightning.contract import deadlines, job_config
from sagemaker_lightning.contract.checkpoint_home import CheckpointHome, ends_with_container
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.failures import report_uncaught
from sagemaker_lightning.contract.restart import ContainerRestart

# SDK 3's ModelTrainer sends the job's source and its own drivers as channels. They are not
# training data.
CODE_CHANNELS = {"code", "sm_drivers"}
GROUPS_VARIABLE = "SM_INSTANCE_GROUPS_DICT"
DRILL_VARIABLE = "SAGEMAKER_LIGHTNING_DRILL"
RESTARTS_VARIABLE = "SAGEMAKER_LIGHTNING_RESTARTS"
COPIES_VARIABLE = "SAGEMAKER_LIGHTNING_COPIES"
# torchrun sets both of these variables; Lightning sets the second.
RANK_VARIABLES = {"RANK": "rank", "LOCAL_RANK": "local rank"}


@dataclass(frozen=True)
class SageMakerEnvironment:
    """What SageMaker tells a training container; defaults outside of SageMaker."""

    hosts: tuple[str, ...] = ("localhost",)
    """The hosts that train, sorted by text: algo-1, algo-10, algo-2.

    SageMaker sorts them so. These are all hosts of the job, or those of the instance groups that
    carry the job's distribution. The first is the main host.
    """
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The hosts of each instance group by its name; empty in a job without groups."""
    current_host: str = "localhost"
    """The name of this host.

    It is not in `hosts` if its instance group takes no part in the training.
    """
    num_gpus: int = 0
    """Number of GPUs of this host, as the toolkit counted them."""
    network_interface: str | None = None
    """The network interface between the hosts, as SageMaker names it.

    This machine may have no interface of that name.
    """
    channels: Mapping[str, Path] = field(default_factory=dict)
    """Input folder of each data channel by name, without the code channels of SDK 3."""
    sharded_channels: frozenset[str] = frozenset()
    """The channels whose files SageMaker divides among the hosts (ShardedByS3Key)."""
    model_dir: Path = Path("output/model")
    """The folder for the trained model; SageMaker uploads it as model.tar.gz."""
    output_data_dir: Path = Path("output/data")
    """The folder for logs; SageMaker uploads it as output.tar.gz."""
    checkpoint_dir: Path = Path("output/data/checkpoints")
    """The folder for checkpoints.

    It is the job's checkpoint folder if the job has one, else a folder below `output_data_dir`.
    """
    copied_dir: Path | None = None
    """The folder that SageMaker copies to S3 and back; None without a CheckpointConfig."""
    is_job: bool = False
    """Whether SageMaker runs this job, or what stands in for it: it names its jobs."""
    revision: str = "unknown"
    """The commit from which the image was built."""
    user_args: tuple[str, ...] | None = None
    """The command line that the toolkit made of the hyperparameters.

    It loses some of them. None if the toolkit did not start this program.
    """
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    """The job's hyperparameters as they were sent."""
    rendezvous_timeout: float = deadlines.HOST_APPEARS
    """Seconds that a host may take until its name resolves and it answers."""
    peer_timeout: float = deadlines.LOST_HOST_ENDS_JOB
    """Seconds within which all ranks end after one is lost."""
    hang_timeout: float = deadlines.HANG_ENDS_PROGRAM
    """Seconds without a sign of work after which the ranks of a host count as hanging."""
    batch_timeout: float = math.inf
    """Seconds that a rank may train without beginning or ending a batch."""
    torchrun: tuple[int, int] | None = None
    """Number of ranks of this node, and of all nodes.

    None if torchrun did not start this process.
    """
    watch: Path | None = None
    """Socket on which this node's watch (nodes/watchdog.py) listens to its ranks.

    None if there is no watch.
    """
    restarts: tuple[ContainerRestart, ...] = ()
    """The restarts of this program in its container so far, oldest first."""
    copies: Path | None = None
    """The folder in memory for copies of the state, from which ranks that have died continue.

    None if nothing starts this program again in its container.
    """
    drill: Mapping[str, Any] | None = None
    """What drill/command.py asks of the run that it drills (drill/drilled_run.py).

    None if this run is not a drill.
    """

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "SageMakerEnvironment":
        """Return the environment that `variables` describe.

        Raises UserError, which names the variable, if one is wrong or contradicts another. If
        nobody catches it, it is reported as report_failures does: a program reads its environment
        before it can enter that.
        """
        try:
            return cls._read(variables)
        except UserError:
            report_uncaught(failure_file(variables), host_and_rank(variables))
            raise

    @classmethod
    def _read(cls, variables: Mapping[str, str]) -> "SageMakerEnvironment":
        all_hosts = tuple(_json(variables, "SM_HOSTS", list, list(cls.hosts)))
        current_host = variables.get("SM_CURRENT_HOST", all_hosts[0] if len(all_hosts) == 1 else "")
        if current_host not in all_hosts:
            raise UserError(
                f"SM_CURRENT_HOST: found {current_host!r}, expected one of SM_HOSTS: "
                f"{', '.join(all_hosts)}"
            )
        output_data_dir = Path(variables.get("SM_OUTPUT_DATA_DIR", cls.output_data_dir))
        return cls(
            hosts=_training_hosts(variables) or all_hosts,
            groups={
                name: tuple(group["hosts"])
                for name, group in _json(variables, GROUPS_VARIABLE, dict, {}).items()
            },
            current_host=current_host,
            num_gpus=_json(variables, "SM_NUM_GPUS", int, 0),
            network_interface=variables.get("SM_NETWORK_INTERFACE_NAME"),
            channels=_channels(variables),
            sharded_channels=_sharded_channels(variables),
            model_dir=Path(variables.get("SM_MODEL_DIR", cls.model_dir)),
            output_data_dir=output_data_dir,
            checkpoint_dir=_checkpoint_dir(variables) or output_data_dir / "checkpoints",
            copied_dir=_copied_dir(variables),
            is_job="TRAINING_JOB_NAME" in variables,
            revision=variables.get("SAGEMAKER_LIGHTNING_REVISION") or cls.revision,
            user_args=tuple(_json(variables, "SM_USER_ARGS", list, ()))
            if "SM_USER_ARGS" in variables
            else None,
            hyperparameters=_hyperparameters(variables),
            rendezvous_timeout=_seconds(
                variables, "SAGEMAKER_LIGHTNING_RENDEZVOUS_TIMEOUT", cls.rendezvous_timeout
            ),
            peer_timeout=_seconds(variables, "SAGEMAKER_LIGHTNING_PEER_TIMEOUT", cls.peer_timeout),
            hang_timeout=_seconds(variables, "SAGEMAKER_LIGHTNING_HANG_TIMEOUT", cls.hang_timeout),
            batch_timeout=_seconds(
                variables, "SAGEMAKER_LIGHTNING_BATCH_TIMEOUT", cls.batch_timeout
            ),
            torchrun=_torchrun(variables),
            watch=watch(variables),
            restarts=tuple(
                map(ContainerRestart.read, _json(variables, RESTARTS_VARIABLE, list, []))
            ),
            copies=Path(variables[COPIES_VARIABLE]) if COPIES_VARIABLE in variables else None,
            drill=_json(variables, DRILL_VARIABLE, dict, None),
        )

    @property
    def log_dir(self) -> Path:
        """Folder of this host's logs.

        If the job has a checkpoint folder, the logs go there, because it survives interruptions.
        """
        output = self.output_data_dir
        checkpoints = self.checkpoint_dir
        return (
            (output if checkpoints.is_relative_to(output) else checkpoints)
            / "tensorboard"
            / self.current_host
        )

    def checkpoint_home(self, folder: Path) -> CheckpointHome:
        """Return what becomes of a folder of checkpoints when this container ends.

        A run of a drill has them in the drill's folder, whatever folder is given.
        """
        if self.drill and self.checkpoint_dir:
            return CheckpointHome(self.checkpoint_dir)
        copied = self.copied_dir
        if copied and folder.resolve().is_relative_to(copied.resolve()):
            return CheckpointHome(folder, True, self.current_host == self.hosts[0])
        if self.is_job:
            lost = "the job has no CheckpointConfig"
            advice = (
                "give it one (--checkpoints of our launcher, checkpoint_s3_uri of SDK 2, "
                "checkpoint_config of SDK 3)"
            )
            if copied:
                lost = f"{folder} is not below {copied}, which SageMaker copies"
                advice = "give a folder that is"
            return CheckpointHome(folder, lost=lost, advice=advice)
        if ends_with_container(folder):
            lost = f"{folder} ends with this container"
            return CheckpointHome(folder, lost=lost, advice="mount a folder at /opt/ml/checkpoints")
        return CheckpointHome(folder)

    def host_name(self, nodes: int, node: int) -> str:
        """Return what messages call this host, and no other one of a job.

        Args:
            nodes: Number of nodes that train.
            node: Number of this one, from 0: outside SageMaker, nothing else tells them apart.
        """
        if nodes < 2 or len(self.hosts) > 1:
            return self.current_host
        return f"node {node} ({socket.gethostname()})"

    @property
    def takes_part(self) -> bool:
        """Whether this host is one of those that train."""
        return self.current_host in self.hosts

    @property
    def num_nodes(self) -> int:
        """Number of nodes that train.

        torchrun's numbers come first: a user may have started it by hand, on hosts that SageMaker
        does not know.
        """
        return self.torchrun[1] // self.torchrun[0] if self.torchrun else len(self.hosts)

    @property
    def training_dir(self) -> Path | None:
        """Folder of the channel `training`, or of the only channel.

        None if there is no channel, or if there are several and none is called `training`.
        """
        return self.channels.get(self._training_channel)

    @property
    def training_is_sharded(self) -> bool:
        """Whether `training_dir` holds a part of the data and other hosts hold the rest."""
        return len(self.hosts) > 1 and self._training_channel in self.sharded_channels

    @property
    def _training_channel(self) -> str:
        return (
            "training"
            if "training" in self.channels or len(self.channels) != 1
            else next(iter(self.channels))
        )


def variables_of(base: Path, gpus: int) -> dict[str, str]:
    """Return the variables that describe a job which the toolkit does not run.

    They come from the files that SageMaker writes. Raises UserError if one cannot be read.

    Args:
        base: The job's folder, /opt/ml.
        gpus: Number of GPUs of this host.
    """
    config = base / "input/config"
    resources = job_config.read(config / "resourceconfig.json")
    channels = job_config.read(config / "inputdataconfig.json")
    variables = {
        "SM_CURRENT_HOST": resources["current_host"],
        "SM_HOSTS": json.dumps(sorted(resources["hosts"])),
        "SM_NETWORK_INTERFACE_NAME": resources.get("network_interface_name", ""),
        "SM_NUM_GPUS": str(gpus),
        "SM_INPUT_CONFIG_DIR": str(config),
        "SM_INPUT_DATA_CONFIG": json.dumps(channels),
        "SM_MODEL_DIR": str(base / "model"),
        "SM_OUTPUT_DIR": str(base / "output"),
        "SM_OUTPUT_DATA_DIR": str(base / "output/data"),
        "SM_CHANNELS": json.dumps(list(channels)),
    }
    return variables | {
        f"SM_CHANNEL_{name.upper()}": str(base / "input/data" / name) for name in channels
    }


def current_host(variables: Mapping[str, str] = os.environ) -> str:
    """Return the name of this host; "unknown" before the job's environment is read."""
    return variables.get("SM_CURRENT_HOST", "unknown")


def failure_file(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file that becomes the job's FailureReason; None outside SageMaker.

    This is a function of its own because `SageMakerEnvironment.read` may fail, which has to be
    reported.
    """
    return Path(variables["SM_OUTPUT_DIR"], "failure") if "SM_OUTPUT_DIR" in variables else None


def in_container(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is in a job's container, whose folder is /opt/ml.

    On a desk, the toolkit's `train` has another one (SAGEMAKER_BASE_DIR).
    """
    return variables.get("SM_OUTPUT_DIR") == "/opt/ml/output"


def watch(variables: Mapping[str, str] = os.environ) -> Path | None:
    """Return the socket on which this node's watch listens; None without one.

    This is a function of its own because `SageMakerEnvironment.read` may fail, which has to be
    reported.
    """
    return (
        Path(variables["SAGEMAKER_LIGHTNING_WATCH"])
        if "SAGEMAKER_LIGHTNING_WATCH" in variables
        else None
    )


def drilled(variables: Mapping[str, str], base: Path, asked: Mapping[str, Any]) -> dict[str, str]:
    """Return `variables` for a run whose model, logs and checkpoints go below `base`.

    They work with any launcher.

    Args:
        variables: The environment to start from.
        base: The folder that replaces /opt/ml.
        asked: What becomes `SageMakerEnvironment.drill` of the run.
    """
    replaced = {
        "SAGEMAKER_BASE_DIR": str(base),
        "SM_MODEL_DIR": str(base / "model"),
        "SM_OUTPUT_DATA_DIR": str(base / "output/data"),
        "SM_CHECKPOINT_DIR": str(base / "checkpoints"),
    }
    # These may belong to a job in which the drill itself runs.
    removed = ("SM_OUTPUT_DIR", "SAGEMAKER_LIGHTNING_WATCH", RESTARTS_VARIABLE, COPIES_VARIABLE)
    kept = {name: value for name, value in variables.items() if name not in removed}
    return kept | replaced | {DRILL_VARIABLE: json.dumps(asked)}


def host_and_rank(variables: Mapping[str, str] = os.environ) -> str:
    """Return the host and rank of this process, for messages.

    Without the global rank, return the rank on this host, which is 0 if it is not known either.
    """
    rank = next(
        (f"{words} {variables[key]}" for key, words in RANK_VARIABLES.items() if key in variables),
        "local rank 0",
    )
    return f"host {variables.get('SM_CURRENT_HOST', 'localhost')}, {rank}"


def _json(variables: Mapping[str, str], name: str, expected_type: type, default: Any) -> Any:
    """Return a variable decoded from JSON, or `default` if it is not set.

    Raises UserError if its value is not of `expected_type`, or if it is an empty list and the
    default is not empty.
    """
    if name not in variables:
        return default
    try:
        value = json.loads(variables[name])
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, expected_type) or (value == [] and default):
        raise UserError(
            f"{name}: found {variables[name]!r}, expected a JSON {expected_type.__name__}, "
            "not empty"
        )
    return value


def _torchrun(variables: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the numbers LOCAL_WORLD_SIZE and WORLD_SIZE; None without torchrun.

    Only torchrun sets LOCAL_WORLD_SIZE. Lightning also sets WORLD_SIZE.
    """
    ranks_of_node = _json(variables, "LOCAL_WORLD_SIZE", int, None)
    if ranks_of_node is None:
        return None
    return ranks_of_node, _json(variables, "WORLD_SIZE", int, 1)


def _seconds(variables: Mapping[str, str], name: str, default: float) -> float:
    """Return a variable as a number of seconds, or `default` if it is not set.

    Raises UserError unless it is at least 1 and below 1,000,000.
    """
    if name not in variables:
        return default
    try:
        value = float(variables[name])
    except ValueError:
        value = 0
    if not 1 <= value < 1e6:  # false for NaN, too
        raise UserError(
            f"{name}: found {variables[name]!r}, expected a number of seconds, 1 or more"
        )
    return value


def _training_hosts(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the instance groups that the job's distribution names.

    Return () if it names none: only a heterogeneous job does. SM_DISTRIBUTION_INSTANCE_GROUPS
    cannot replace this: if the job names no group, that variable names the group of this host.
    Raises UserError if the job has groups, but none of a name that the distribution gives.
    """
    parameters = _json(variables, "SM_FRAMEWORK_PARAMS", dict, {})
    named = parameters.get("sagemaker_distribution_instance_groups") or []
    named = [named] if isinstance(named, str) else named
    groups = _json(variables, GROUPS_VARIABLE, dict, {})
    if wrong := [name for name in named if name not in groups] if groups else []:
        raise UserError(
            f"sagemaker_distribution_instance_groups: found {wrong[0]!r}, expected the groups: "
            f"{', '.join(groups)}"
        )
    return tuple(sorted(host for name in named if name in groups for host in groups[name]["hosts"]))


def _channels(variables: Mapping[str, str]) -> dict[str, Path]:
    """Return the folder of each channel in SM_CHANNELS that holds data.

    The variable's name has the channel's name in upper case; the toolkit changes nothing else in
    it. Raises UserError if the variable of a channel is missing or empty.
    """
    names = _json(variables, "SM_CHANNELS", list, [])
    if not names:  # outside SageMaker, SM_CHANNEL_TRAINING alone is enough
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
    empty = [name for name in names if not variables[f"SM_CHANNEL_{name.upper()}"]]
    if empty:
        raise UserError(
            f"SM_CHANNEL_{empty[0].upper()}: found an empty text, expected the folder of the "
            f"channel {empty[0]!r}; give it, or leave the variable out"
        )
    return {
        name: Path(variables[f"SM_CHANNEL_{name.upper()}"])
        for name in sorted(names)
        if name not in CODE_CHANNELS
    }


def _sharded_channels(variables: Mapping[str, str]) -> frozenset[str]:
    """Return the channels that SM_INPUT_DATA_CONFIG calls ShardedByS3Key.

    That variable is the toolkit's copy of inputdataconfig.json.
    """
    config = _json(variables, "SM_INPUT_DATA_CONFIG", dict, {})
    distribution_types = {
        name: entry.get("S3DistributionType")
        for name, entry in config.items()
        if isinstance(entry, dict)
    }
    return frozenset(
        name
        for name, distribution_type in distribution_types.items()
        if distribution_type == "ShardedByS3Key"
    )


def _hyperparameters(variables: Mapping[str, str]) -> dict[str, object]:
    """Return the content of hyperparameters.json.

    SM_HPS cannot replace it: it has lost how numbers were written.
    """
    file = Path(variables.get("SM_INPUT_CONFIG_DIR", "/nonexistent"), "hyperparameters.json")
    return job_config.read(file) if file.is_file() else {}


def _checkpoint_dir(variables: Mapping[str, str]) -> Path | None:
    """Return the job's checkpoint folder; None if it has none.

    It is the one in checkpointconfig.json, or /opt/ml/checkpoints if that exists. SageMaker sets no
    variable for it; a person may set SM_CHECKPOINT_DIR.
    """
    if "SM_CHECKPOINT_DIR" in variables:
        return Path(variables["SM_CHECKPOINT_DIR"])
    if copied := _copied_dir(variables):
        return copied
    folder = Path(variables.get("SM_MODEL_DIR", "/nonexistent/model")).parent / "checkpoints"
    return folder if folder.is_dir() else None


def _copied_dir(variables: Mapping[str, str]) -> Path | None:
    """Return the folder that SageMaker copies to S3; None if the job has no CheckpointConfig."""
    # A job that does not come by the toolkit has the files, but no variable.
    folder = "/opt/ml/input/config" if "TRAINING_JOB_NAME" in variables else "/nonexistent"
    config = Path(variables.get("SM_INPUT_CONFIG_DIR", folder), "checkpointconfig.json")
    return Path(job_config.checkpoint_path(config)) if config.is_file() else None
