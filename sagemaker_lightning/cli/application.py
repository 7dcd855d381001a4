"""What a program gives the CLI: the model and the data that no flag has to name, settings, recipes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a job that splits rows has no need of Lightning, which takes seconds
    from pytorch_lightning import LightningDataModule, LightningModule


@dataclass(frozen=True)
class Application:
    """The defaults of a program; without any, --model and --data are to be given."""

    model: "type[LightningModule] | None" = None
    """What is trained where no --model is given."""
    data: "type[LightningDataModule] | None" = None
    """What is trained on where neither --data nor a channel is given, and the model has no data of its own."""
    channel_data: "type[LightningDataModule] | None" = None
    """The same in a job with channels, and where a flag gives --data.data_dir; None for `data`."""
    settings: Path | None = None
    """A YAML file of settings that differ from those of the classes; a flag wins over a line in it."""
    recipes: Path | None = None
    """The folder of YAML files that --config takes by their names."""
    renamed_recipes: Mapping[str, str] = field(default_factory=dict)
    """Recipes by the names that they had."""

    @property
    def recipe_files(self) -> dict[str, str]:
        """The path of each recipe by its name."""
        return (
            {path.stem: str(path) for path in sorted(self.recipes.glob("*.yaml"))}
            if self.recipes
            else {}
        )


def class_path(kind: type) -> str:
    """Return the import path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
