"""The start of a run that resumes: which checkpoint it is, and what is said of it."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sagemaker_lightning.compat.model_parallel import mesh_of, mesh_sizes
from sagemaker_lightning.compat.torch_modules import named_buffers, named_parameters, plain_name
from sagemaker_lightning.contract.errors import UserError
from sagemaker_lightning.contract.log import log
from sagemaker_lightning.resume import first_draws
from sagemaker_lightning.resume.files import best_model, checkpoint_file, shards
from sagemaker_lightning.resume.files.checkpoint_dir import choose_checkpoint
from sagemaker_lightning.resume.parts.given_parts import GivenParts, parts_of
from sagemaker_lightning.resume.parts.gradients import Gradients
from sagemaker_lightning.resume.parts.limits import Limits
from sagemaker_lightning.resume.parts.parameter_groups import ParameterGroups
from sagemaker_lightning.resume.parts.rank_buffers import RankBuffers
from sagemaker_lightning.resume.parts.roots import objects_of_module
from sagemaker_lightning.resume.resumption import Resumption, sharded_text
from sagemaker_lightning.resume.same_run import earlier_fits
from sagemaker_lightning.resume.snapshot import LIGHTNING_KEYS, may_have_users_objects
from sagemaker_lightning.state.graph import values
from sagemaker_lightning.state.readable import with_values

if TYPE_CHECKING:
    from sagemaker_lightning.resume.run import Run

CLASSES_OF_ENTRIES: dict[str, type | tuple[type, ...]] = {
    "journal": bytes,
    "resumes": (list, tuple),
    "run": Mapping,
    "parts": Mapping,
    "ranks": (list, tuple),
    "exact_values": Mapping,
}
"""What those entries are of that are not numbers."""


def refuse_another_model(run: "Run") -> None:
    """Raise UserError if this process has trained another model with the run's folder.

    It would get the weights of the other one.
    """
    folder = run.folder
    is_another = earlier_fits.was_of_another_model(
        run.options.first_folder, run.trainer.lightning_module
    )
    if is_another and folder.checkpoints():
        raise UserError(
            f"{folder.label}: this program has already trained another model to its end "
            "with these checkpoints; give each training a folder of its own"
        )


def choose(run: "Run") -> Path | None:
    """Return the newest checkpoint that every host has intact; None without any."""
    # Rank 0 alone writes the best model and reads it.
    trainer = run.trainer
    callbacks = best_model.callbacks(trainer) if trainer.is_global_zero else []
    own_ranks = range(trainer.global_rank, trainer.global_rank + trainer.num_devices)
    return choose_checkpoint(
        run.folder,
        run.host,
        run.agreement.gather,
        trainer.local_rank == 0,
        callbacks[0].missing_file if callbacks else lambda path: "",
        partial(
            shards.problem,
            mesh=mesh_sizes(trainer),
            ranks=trainer.world_size,
            own_ranks=own_ranks,
        ),
        is_restart=bool(run.environment.restarts),
    )


def refuse_lost_training(run: "Run") -> None:
    """Raise UserError if an earlier training than the newest one has no checkpoint any more.

    A program that is started again comes by its earlier trainings to the newest one.
    """
    if later := _later_folder(run):
        raise UserError(
            f"{run.folder.label}: found no checkpoint, expected the last one of the training "
            f"before that of {later}; restore it from a copy, or move {later} away"
        )


def refuse_other_length(run: "Run", resumed: Resumption) -> None:
    """Raise UserError if an earlier training than the newest one is to end elsewhere."""
    before, now = resumed.of(Limits)["of_flags"], run.part(Limits).of_flags
    later = _later_folder(run)
    if later and before != now:
        raise UserError(
            f"{run.folder.label}: found max_epochs={now[0]} and max_steps={now[1]}, expected "
            f"{before[0]} and {before[1]}: the training of {later} began where this one ended; "
            f"continue with these, or move {later} away"
        )


def _later_folder(run: "Run") -> str:
    """Return the folder of the newest later training, as rank 0 sees it; "" if there is none."""
    later = run.options.later
    return run.agreement.gather(str(later.path) if later else "")[0]


def warn_of_random_model(run: "Run") -> None:
    """Warn if the model was made by draws that the run's seed does not decide."""
    name = run.options.seed_name if run.options.fit == 1 else ""
    is_random = name and first_draws.are_random(run.trainer.lightning_module)
    if is_random and run.trainer.is_global_zero:
        log.warning(
            f"{name}: the model was made before this callback, and nothing was seeded: what it "
            "drew, such as its first weights, differs each time the program starts; make the "
            "callback first"
        )


def read(run: "Run", path: Path) -> Resumption:
    """Return what a checkpoint has.

    Raises:
        UserError: It is of another run.
    """
    trainer = run.trainer
    content = checkpoint_file.read(path)
    entries = content[checkpoint_file.ENTRIES_KEY]
    for name in ("step", "number", "seed", "world_size"):
        if type(entries[name]) is not int or entries[name] < 0:
            raise TypeError(name)
    for name, class_ in CLASSES_OF_ENTRIES.items():
        if not isinstance(entries[name], class_):
            raise TypeError(name)
    if len(entries["ranks"]) != entries["world_size"]:
        raise ValueError("ranks")
    resumed = Resumption(
        path.name, content, trainer.global_rank, trainer.world_size, mesh_sizes(trainer)
    )
    run.same_run.compare(
        resumed.entries["run"],
        path.name,
        resumed.same_ranks,
        parts_of(trainer).differences(resumed.of(GivenParts)),
    )
    resumed.resolve(_reader(run, resumed, path.parent))
    return resumed


def _reader(run: "Run", resumed: Resumption, folder: Path) -> shards.ShardReader:
    """Return what reads the tensors that are shared out."""
    model = run.trainer.lightning_module
    weights: dict[str, Tensor] = dict(named_parameters(model, remove_duplicate=False))
    weights |= named_buffers(model, remove_duplicate=False)
    groups = resumed.of(ParameterGroups)

    def like(path: tuple[Any, ...]) -> Tensor | None:
        match [key for key in path if key != checkpoint_file.BEFORE_HOOKS]:
            case ["state_dict", str(name)] | ["ranks", Gradients.key, str(name)]:
                return weights.get(plain_name(name))
            case ["ranks", RankBuffers.key, str(name)]:
                return weights.get(name.removeprefix("model."))
            case ["optimizer_states", int(optimizer), "state", int(index), *_]:
                names = [name for group in groups[optimizer] for name in group]
                return weights.get(names[index])
        return None

    mesh = mesh_of(run.trainer)
    return shards.ShardReader(folder, resumed.entries, run.trainer.global_rank, mesh, like)


def announce(run: "Run", resumed: Resumption, path: Path, given_path: Any) -> None:
    """Print from where the run resumes.

    Args:
        run: The run.
        resumed: The checkpoint.
        path: Its file.
        given_path: What `fit(ckpt_path=...)` got.
    """
    if not run.trainer.is_global_zero:
        return
    note = (
        ""
        if resumed.same_ranks
        else (
            f"; {resumed.world_size} ranks{sharded_text(resumed.mesh)} saved it, now there are "
            f"{run.trainer.world_size}{sharded_text(mesh_sizes(run.trainer))}: "
            "no sample is left out or taken twice, but the run is no longer bit-identical "
            "to one without an interruption"
        )
    )
    if earlier_fits.has_saved(run.options.first_folder, run.options.fit, resumed.entries["number"]):
        note += (
            " of this program's last training; what the program changed after that training, such "
            "as weights, or attributes in on_train_end(), is lost"
        )
    level = logging.INFO if resumed.same_ranks else logging.WARNING
    log.log(level, f"resuming from step {resumed.step}: {path}{note}")
    if given_path:
        log.warning(
            f"{given_path} was not loaded: this run has checkpoints of its own, and continues "
            f"from the newest one in {run.folder.path}"
        )


def announce_other_length(run: "Run", resumed: Resumption) -> None:
    """Print how many batches an epoch has, if it had another number with the ranks before.

    Their batches, and how they share out what an epoch's last batch leaves, decide that.

    Args:
        run: The run, with its training data.
        resumed: The checkpoint.
    """
    before, now = resumed.entries.get("epoch_batches"), run.trainer.num_training_batches
    differs = isinstance(before, int) and before != now
    if resumed.same_ranks or not differs or not run.trainer.is_global_zero:
        return
    log.warning(
        f"an epoch has {now} batches now, and had {before} with {resumed.world_size} ranks"
        f"{sharded_text(resumed.mesh)}: it depends on the number of ranks and their batch size; "
        "what counts steps, such as max_steps or a schedule by steps, comes after another number "
        "of samples"
    )


def decoded(run: "Run", resumed: Resumption) -> dict[str, Any]:
    """Return what Lightning loads.

    No entry of Lightning's, but for the schedules, is an object of the program's.
    """
    records = resumed.exact_values
    of_lightning = values.decode(records["lightnings"])
    of_users = values.decode(records["users"], objects_of_module(run.trainer))
    others = {path: each for path, each in of_lightning.items() if path[0] in LIGHTNING_KEYS}
    others |= {path: each for path, each in of_users.items() if may_have_users_objects(path)}
    checkpoint: dict[str, Any] = with_values(resumed.checkpoint, others)
    return checkpoint
