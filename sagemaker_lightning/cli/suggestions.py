"""Suggestions for a wrong name: its replacement, similar names, all choices."""

import difflib
import inspect
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

# What to do instead of flags of earlier versions of Lightning and of the tutorial, and of arguments
# that scripts of SageMaker's examples take. docs/from-the-tutorial.md has the same words.
FROM_THE_JOB = "leave it out: it is taken from the job"
REPLACED = {
    "weights_save_path": (
        "leave it out in a job; elsewhere, use --checkpoint.dirpath and --resume.dirpath"
    ),
    "checkpoint_callback": "use --trainer.enable_checkpointing; --checkpoint.* has its settings",
    "resume_from_checkpoint": (
        "leave it out: the newest checkpoint in --resume.dirpath is resumed from"
    ),
    "gpus": "use --trainer.accelerator=gpu and --trainer.devices=N (-1: all)",
    "auto_select_gpus": "leave it out: --trainer.devices=N takes the first N GPUs",
    "num_processes": "use --trainer.accelerator=cpu and --trainer.devices=N",
    "tpu_cores": "leave it out: TPUs are not supported",
    "ipus": "leave it out: Lightning runs on no IPUs any more",
    "distributed_backend": "use --trainer.strategy=ddp",
    "progress_bar_refresh_rate": "use --progress.every_n_seconds",
    "process_position": "leave it out",
    "weights_summary": "use --trainer.enable_model_summary",
    "flush_logs_every_n_steps": "use --logger.flush_secs",
    "log_gpu_memory": (
        "leave it out: --system.every_n_seconds says how often the GPU's memory is logged"
    ),
    "track_grad_norm": "leave it out; log the norm in the model's on_before_optimizer_step",
    "terminate_on_nan": "leave it out: a loss that is not finite ends the job",
    "auto_scale_batch_size": "leave it out; choose --data.batch_size",
    "auto_lr_find": "leave it out; choose --optimizer=NAME and --optimizer.lr",
    "amp_backend": "use --trainer.precision=16-mixed",
    "amp_level": "use --trainer.precision=16-mixed",
    "replace_sampler_ddp": "use --trainer.use_distributed_sampler",
    "reload_dataloaders_every_epoch": "use --trainer.reload_dataloaders_every_n_epochs=1",
    "prepare_data_per_node": "leave it out; set it in the data module's __init__",
    "move_metrics_to_cpu": "leave it out",
    "multiple_trainloader_mode": (
        "leave it out; return a CombinedLoader with a mode from the data module"
    ),
    "stochastic_weight_avg": (
        "use --trainer.callbacks=StochasticWeightAveraging and --trainer.callbacks.swa_lrs"
    ),
    "lr": "use --optimizer=NAME and --optimizer.lr",
    "learning_rate": "use --optimizer=NAME and --optimizer.lr",
    "weight_decay": "use --optimizer=NAME and --optimizer.weight_decay",
    "momentum": "use --optimizer=SGD and --optimizer.momentum",
    "epochs": "use --trainer.max_epochs",
    "model_dir": FROM_THE_JOB,
    "output_data_dir": FROM_THE_JOB,
    "hosts": FROM_THE_JOB,
    "current_host": FROM_THE_JOB,
    "num_gpus": FROM_THE_JOB,
}


def choice(given: str, bases: Sequence[str]) -> str:
    """Return which classes may be chosen, and a similar name if there is one.

    Args:
        given: The name that was given.
        bases: Import paths of the base classes that the parser accepts.
    """
    names = sorted({kind.__name__ for base in bases for kind in subclasses(base)})
    base_names = dict.fromkeys(base.rpartition(".")[2] for base in bases)
    names = [name for name in names if name not in base_names]
    kinds = " or ".join(base_names)
    matches = closest(given, names)
    suggestion = f"; did you mean {matches[0]}?" if matches else ""
    found = f"{listed(names, 450)} or " if names else ""
    return f"{found}the import path of a subclass of {kinds}{suggestion}"


def subclasses(path: str) -> set[type]:
    """Return a class's public subclasses that are not abstract.

    Those that the flags make by themselves are left out.
    """
    found: set[type] = set()
    pending = [find_class(path)]
    while pending:
        children: list[type] = pending.pop().__subclasses__()
        found.update(
            child
            for child in children
            if not inspect.isabstract(child)
            and not child.__name__.startswith("_")
            and not _is_made_by_flags(child)
        )
        pending += children
    return found


def _is_made_by_flags(kind: type) -> bool:
    """Return whether this is a class of ours that is not for a flag to name.

    They are callbacks that the flags make in any case, and loggers in the place of Lightning's.
    """
    package, _, module = kind.__module__.partition(".")
    return package == "sagemaker_lightning" and not module.startswith("cli.")


def why_not(given: str) -> str:
    """Return why an import path fails; "" if it does not, or is not an import path."""
    module, _, name = given.rpartition(".")
    if not module or not all(part.isidentifier() for part in given.split(".")):
        return ""
    try:
        getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        here = str(Path.cwd())
        return f" ({error}{f', looked for in {here}' if here in sys.path else ''})"
    # The module may raise anything.
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        # A SyntaxError says itself in which line it is.
        if last.filename == __file__ or isinstance(error, SyntaxError):
            return f" ({first_line(error)})"
        return (
            f" ({type(error).__name__}: {first_line(error)}, {Path(last.filename).name} line "
            f"{last.lineno})"
        )
    return ""


def closest(word: str, words: list[str], cutoff: float = 0.6) -> list[str]:
    """Return a list of the most similar one among `words`; it may be empty."""
    return difflib.get_close_matches(word, words, 1, cutoff)


def first_line(error: Exception) -> str:
    """Return an exception's message, or its class, in at most 150 characters."""
    return shortened(" ".join(str(error).split()) or type(error).__name__, 150)


def shown(value: str) -> str:
    """Return a given value in quotes, shortened to 60 characters."""
    return repr(shortened(value, 60))


def shortened(text: str, length: int) -> str:
    """Return `text`, cut to `length` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def listed(words: list[str], room: int) -> str:
    """Return words with commas between them, as many as fit into `room` characters."""
    fitting = list(words)
    while len(fitting) > 1 and len(", ".join(fitting)) > room:
        fitting.pop()
    more = f" and {len(words) - len(fitting)} more" if len(fitting) < len(words) else ""
    return shortened(", ".join(fitting), room) + more


def find_class(path: str) -> type:
    """Return the class at an import path."""
    module, _, name = path.rpartition(".")
    found: type = getattr(import_module(module), name)
    return found
