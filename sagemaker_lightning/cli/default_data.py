"""Which data module is trained on where no flag names one, and what SageMaker tells the one that is named."""

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
    """Return the default of --data: class path and what SageMaker says of the data; None for the model's own loaders.

    Args:
        args: The command line.
        has_channels: Whether the job has channels.
        settings: What SageMaker says of the data, by the name of a data module's parameter.
        application: What the program trains on by default.
    """
    of_a_folder = application.channel_data or application.data
    default = of_a_folder if has_channels else application.data
    own = False  # whether the model has training data of its own
    with suppress(Exception):  # the parser itself will say what is wrong
        if name := _class_path(args, "data", LightningDataModule):
            # No more than the class takes: else it would be given our batch size, and not its own.
            known = flags.settings(name)
            return {
                "class_path": name,
                "init_args": {key: settings[key] for key in settings if key in known},
            }
        if any("data_dir" in (key, *_settings_in(value)) for key, value in _given(args, "data")):
            default = of_a_folder  # who gives a folder wants what is in it
        name = _class_path(args, "model", LightningModule)
        own = name and has_own_data(name)
    if own:
        if others := [f"--data.{key}" for key, _ in _given(args, "data") if key]:
            raise UserError(
                f"{others[0]}: the model has a train_dataloader of its own, which takes no such "
                "setting; leave it out, or give --data=NAME to train on other data"
            )
        return None
    if not default:
        return None
    return {"class_path": class_path(default)} | ({"init_args": dict(settings)} if settings else {})


def has_own_data(model: str) -> bool:
    """Say whether a model, by its import path, has a train_dataloader of its own."""
    return _class(model).train_dataloader is not LightningModule.train_dataloader


def _given(args: list[str], group: str) -> Iterator[tuple[str, Any]]:
    """Yield what flags and the files of --config say of a group, in their order: (setting, value), "" for the group."""
    for word, after in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        value = value if equals else after
        if name == "--config":
            content = yaml.safe_load(Path(value).read_text()) or {}
            if group in content:
                yield "", content[group]
        elif name == f"--{group}":
            yield "", yaml.safe_load(value)
        elif name.startswith(f"--{group}."):
            yield name.removeprefix(f"--{group}.").removeprefix("init_args."), value


def _settings_in(value: Any) -> Mapping[str, Any]:
    """Return the settings in what is given for a whole group."""
    return value.get("init_args", value) if isinstance(value, dict) else {}


def _class_path(args: list[str], group: str, base: type) -> str | None:
    """Return the import path of the class that is chosen for a group, None if none is."""
    chosen = None
    for key, value in _given(args, group):
        if key in ("", "class_path"):
            chosen = (value.get("class_path") if isinstance(value, dict) else value) or chosen
    if not chosen:
        return None
    alone = LightningArgumentParser(exit_on_error=False)
    alone.add_subclass_arguments(base, group, required=False)
    return alone.parse_args([f"--{group}={chosen}"])[group].class_path


def _class(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
