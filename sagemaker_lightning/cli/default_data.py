"""The default of --data, and what SageMaker says about the data."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pytorch_lightning import LightningDataModule, LightningModule

from sagemaker_lightning.cli import flags
from sagemaker_lightning.cli.application import Application, class_path
from sagemaker_lightning.cli.suggestions import find_class
from sagemaker_lightning.contract.errors import UserError


def default_data(
    args: list[str], has_channels: bool, settings: Mapping[str, Any], application: Application
) -> dict[str, Any] | None:
    """Return the default of --data, None for the model's own data.

    Args:
        args: The command line.
        has_channels: Whether the job has channels.
        settings: What SageMaker says about the data, by the names of a data module's parameters.
        application: The program's defaults.

    Raises UserError if the model has data of its own and a flag sets something else than --data.
    """
    folder_data = application.channel_data or application.data
    default = folder_data if has_channels else application.data
    given: list[flags.Setting] = []
    has_own = False
    # The parser itself reports what is wrong with the flags.
    with suppress(Exception):
        given = list(flags.given(args))
        if path := _chosen_class_path(given, "--data", LightningDataModule):
            # Only settings that the class has: the defaults must not give it our batch size in
            # place of its own.
            parameters = flags.settings(find_class(path))
            return {
                "class_path": path,
                "init_args": {key: settings[key] for key in settings if key in parameters},
            }
        if any(setting.flag == "--data.data_dir" for setting in given):
            # Whoever gives a folder wants the data in it.
            default = folder_data
        path = _chosen_class_path(given, "--model", LightningModule)
        has_own = path is not None and has_own_data(path)
    if has_own:
        if others := [setting.flag for setting in given if setting.flag.startswith("--data.")]:
            raise UserError(
                f"{others[0]}: the model has a train_dataloader of its own, which takes no such "
                "setting; leave it out, or give --data=NAME to train on other data"
            )
        return None
    if not default:
        return None
    return {"class_path": class_path(default)} | ({"init_args": dict(settings)} if settings else {})


def has_own_data(model: str) -> bool:
    """Return whether a model, named by its import path, has its own train_dataloader."""
    own = getattr(find_class(model), "train_dataloader", None)
    return own is not LightningModule.train_dataloader


def _chosen_class_path(given: list[flags.Setting], flag: str, base: type) -> str | None:
    """Return the import path of the class that a flag chooses; None without one.

    As for the parser, a name without a module is that of an imported subclass, and a file has the
    class's settings. Raises any exception if it is not a subclass of `base`.
    """
    names = [setting.value for setting in given if setting.flag == flag]
    chosen = next((name for name in reversed(names) if name not in ("", "null")), None)
    if chosen and flags.is_file(chosen):
        chosen = flags.settings_in(chosen)["class_path"]
    if not chosen:
        return None
    if "." not in chosen:
        return next(class_path(kind) for kind in _descendants(base) if kind.__name__ == chosen)
    if not issubclass(find_class(chosen), base):
        raise TypeError(f"{chosen} is not a {base.__name__}")
    return chosen


def _descendants(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield child
        yield from _descendants(child)
