"""The defaults that a program gives the CLI: model, data, settings and recipes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

# A job that splits rows does not need Lightning, whose import takes seconds.
if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, LightningModule


@dataclass(frozen=True)
class Application:
    """The defaults of a program; without them, the user must give --model and --data."""

    model: "type[LightningModule] | None" = None
    """The model without --model."""
    data: "type[LightningDataModule] | None" = None
    """The data module without --data and without channels, if the model has no data of its own."""
    channel_data: "type[LightningDataModule] | None" = None
    """The data module in a job with channels, or with --data.data_dir; None for `data`."""
    settings: Path | None = None
    """A YAML file of settings that differ from the classes' own defaults; flags override it."""
    recipes: Path | None = None
    """A folder of YAML files that --config takes by name."""

    @property
    def recipe_files(self) -> dict[str, str]:
        """The path of each recipe, by its name."""
        return (
            {path.stem: str(path) for path in sorted(self.recipes.glob("*.yaml"))}
            if self.recipes
            else {}
        )


def class_path(kind: type) -> str:
    """Return the import path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
