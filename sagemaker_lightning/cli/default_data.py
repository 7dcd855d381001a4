"""The default of --data, and what SageMaker says about the data."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.cli import LightningArgumentParser

from sagemaker_lightning.cli import flags
from sagemaker_lightning.cli.application import Application, class_path
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
    has_own = False
    # The parser itself reports what is wrong with the flags.
    with suppress(Exception):
        if name := _chosen_class_path(args, "data", LightningDataModule):
            # Only settings that the class has: the defaults must not give it our batch size in
            # place of its own.
            parameters = flags.settings(_import_class(name))
            return {
                "class_path": name,
                "init_args": {key: settings[key] for key in settings if key in parameters},
            }
        if any(
            "data_dir" in (key, *_settings_of_class(value))
            for key, value in _settings_given(args, "data")
        ):
            # Whoever gives a folder wants the data in it.
            default = folder_data
        name = _chosen_class_path(args, "model", LightningModule)
        has_own = name and has_own_data(name)
    if has_own:
        if others := [f"--data.{key}" for key, _ in _settings_given(args, "data") if key]:
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
    return _import_class(model).train_dataloader is not LightningModule.train_dataloader


def _settings_given(args: list[str], group: str) -> Iterator[tuple[str, Any]]:
    """Yield a group's (setting, value) pairs from flags and --config files, in order.

    The setting is "" where the value is that of the whole group.
    """
    for word, next_word in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        value = value if equals else next_word
        if name == "--config":
            content = yaml.safe_load(Path(value).read_text()) or {}
            if group in content:
                yield "", content[group]
        elif name == f"--{group}":
            yield "", yaml.safe_load(value)
        elif name.startswith(f"--{group}."):
            yield name.removeprefix(f"--{group}.").removeprefix("init_args."), value


def _settings_of_class(value: Any) -> Mapping[str, Any]:
    """Return the settings in a value that is given for a whole group."""
    return value.get("init_args", value) if isinstance(value, dict) else {}


def _chosen_class_path(args: list[str], group: str, base: type) -> str | None:
    """Return the import path of the class chosen for a group; None without one."""
    chosen = None
    for key, value in _settings_given(args, group):
        if key in ("", "class_path"):
            chosen = (value.get("class_path") if isinstance(value, dict) else value) or chosen
    if not chosen:
        return None
    group_parser = LightningArgumentParser(exit_on_error=False)
    group_parser.add_subclass_arguments(base, group)
    return group_parser.parse_args([f"--{group}={chosen}"])[group].class_path


def _import_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
