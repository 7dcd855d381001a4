"""Makes `pytorch_lightning` and `lightning.pytorch` two names of the same modules.

Lightning comes as two distributions of the same code: pytorch-lightning has the packages
pytorch_lightning and lightning_fabric; lightning has lightning.pytorch and lightning.fabric, and
asks for pytorch-lightning besides. A process that imports both has each class twice, and the
Trainer of one says that a model of the other "is not a subclass of LightningModule". `import
sagemaker_lightning` registers a finder that imports the packages of one distribution alone, and
gives their modules under the names of the other as well.

Every Python process of the image registers the finder when it starts. So this module imports only
what Python has imported by then: no typing, pathlib or logging, which take 10 ms.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from sagemaker_lightning.contract.errors import UserError

TYPE_CHECKING = False  # typing's, which is not imported
if TYPE_CHECKING:
    from typing import Any

PYTORCH_LIGHTNING = "pytorch-lightning"
LIGHTNING = "lightning"
PACKAGES = {
    PYTORCH_LIGHTNING: ("pytorch_lightning", "lightning_fabric"),
    LIGHTNING: ("lightning.pytorch", "lightning.fabric"),
}
"""The distributions and their packages; packages at the same position have the same code."""

MALICIOUS_VERSIONS = ("2.6.2", "2.6.3")
"""Releases that stole credentials when they were imported (GHSA-w37p-236h-pfx3)."""

# It becomes the package `lightning` where pytorch-lightning is what is imported.
ROOT = os.path.join(os.path.dirname(__file__), "lightning_root.py")  # noqa: PTH118, PTH120


def register() -> None:
    """Register the finder, in place of one that another copy of this module has registered."""
    sys.meta_path[:] = [_Finder(), *(finder for finder in sys.meta_path if not _is_ours(finder))]


def imported() -> list[str]:
    """Return the distributions whose packages this process has imported: two are one too many."""
    return [
        distribution
        for distribution, packages in PACKAGES.items()
        if any(getattr(sys.modules.get(name), "__name__", "") == name for name in packages)
    ]


def distribution() -> str:
    """Return the distribution whose packages are imported under both names.

    It is the one that is imported already, else pytorch-lightning if it is installed, else
    lightning; "" if neither is installed.
    """
    if already := imported():
        return already[0]
    if _find_elsewhere("pytorch_lightning"):
        return PYTORCH_LIGHTNING
    return LIGHTNING if _is_lightning(_find_elsewhere(LIGHTNING)) else ""


def first_name(name: str) -> str:
    """Return the name that a module of Lightning really has, for either of its names.

    A name that is not a module's of Lightning is returned as it is. Nothing is imported.
    """
    if not (real_distribution := distribution()):
        return name
    for packages in zip(*PACKAGES.values(), strict=True):
        real_package = packages[list(PACKAGES).index(real_distribution)]
        for package in packages:
            if f"{name}.".startswith(f"{package}."):
                return f"{real_package}{name.removeprefix(package)}"
    return name


def refuse_malicious() -> None:
    """Raise UserError if a malicious release of Lightning is installed; nothing of it is run."""
    from importlib import metadata  # 20 ms: only a process that imports Lightning takes them

    for package in PACKAGES:
        for found in metadata.distributions(name=package):
            if found.version in MALICIOUS_VERSIONS:
                raise UserError(
                    f"{found.metadata['Name']}: found {found.version}, a malicious release that "
                    "steals credentials (GHSA-w37p-236h-pfx3), expected any other; uninstall it, "
                    "and renew the credentials of each machine that has imported it"
                )


class _Finder:
    """Finds the modules of Lightning under the names that the distribution does not have."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for `lightning`, or for a second name of a module; None for all others.

        Raises UserError instead of importing a malicious release.
        """
        if not name.startswith(("pytorch_lightning", "lightning")):
            return None
        if name in ("pytorch_lightning", LIGHTNING):
            refuse_malicious()
        if name == LIGHTNING:
            return _root_spec()
        return _second_name_spec(name)

    def find_distributions(self, context: "Any") -> object:
        """Return the installed distribution if code asks for the other one's metadata.

        `version("lightning")` is then the version of what `import lightning` gives. A list of all
        that is installed, as pip's, does not name it.
        """
        name = (context.name or "").replace("_", "-").lower()
        if name not in PACKAGES:
            return ()
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        if any(MetadataPathFinder.find_distributions(context)):
            return ()
        (other,) = PACKAGES.keys() - {name}
        return MetadataPathFinder.find_distributions(
            DistributionFinder.Context(name=other, path=context.path)
        )


class _SecondName:
    """Loads a module under a second name: as the very object that has the first name."""

    def __init__(self, real_name: str) -> None:
        self.real_name = real_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the first name.

        Another thread that imports the second name at the same time gets this object, too: an empty
        module, replaced in `exec_module`, could be seen by it.
        """
        # Its root first. An import of `lightning.pytorch` locks that name and then `lightning`; the
        # import of `lightning` locks them the other way round.
        importlib.import_module(self.real_name.partition(".")[0])
        module = importlib.import_module(self.real_name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own spec, which the import system has replaced by this one's."""
        spec = module.__spec__
        assert spec is not None  # the import system has just set it
        module.__spec__ = spec.loader_state
        import logging

        # Lightning's documentation sets levels by logging.getLogger("lightning.pytorch").
        loggers = logging.Logger.manager.loggerDict
        loggers.setdefault(spec.name, logging.getLogger(self.real_name))

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code, which `python -m` asks for."""
        code: CodeType | None = _loader(self.real_name).get_code(self.real_name)
        return code

    def get_source(self, fullname: str) -> str | None:
        """Return the source."""
        source: str | None = _loader(self.real_name).get_source(self.real_name)
        return source


def _root_spec() -> ModuleSpec | None:
    """Return the spec of our package `lightning`; None if another one is to be imported."""
    there = _find_elsewhere(LIGHTNING)
    is_users_own = there is not None and there.has_location and not _is_lightning(there)
    if is_users_own or distribution() != PYTORCH_LIGHTNING:
        return None
    # What the installed `lightning` has besides, such as lightning.data, is found in its folder.
    folders = list(there.submodule_search_locations or ()) if there else []
    from importlib.util import spec_from_file_location

    spec = spec_from_file_location(LIGHTNING, ROOT)
    assert spec is not None  # ROOT is a file of Python
    spec.submodule_search_locations = folders
    return spec


def _second_name_spec(name: str) -> ModuleSpec | None:
    """Return a spec if a name is the second one of a module; None if it is the first or unknown."""
    real_name = first_name(name)
    if real_name == name:
        return None
    root = getattr(sys.modules.get(LIGHTNING), "__file__", None) or ""
    if name.startswith(f"{LIGHTNING}.") and os.path.basename(root) != os.path.basename(ROOT):  # noqa: PTH119
        return None  # the root is a package of the user's own, and no copy of ours
    if name in (package for packages in PACKAGES.values() for package in packages):
        # It is there; to look at it would import `lightning`.
        return ModuleSpec(name, _SecondName(real_name), is_package=True)  # type: ignore[arg-type]  # it loads as a Loader does
    if not (there := _find(real_name)):
        return None
    spec = ModuleSpec(name, _SecondName(real_name), origin=there.origin)  # type: ignore[arg-type]  # as above
    spec.submodule_search_locations = there.submodule_search_locations
    return spec


def _find(name: str) -> ModuleSpec | None:
    """Return the spec of a module; only the packages that it is in are imported."""
    from importlib.util import find_spec

    return find_spec(name)


def _loader(name: str) -> "Any":
    """Return what loads a module; Lightning's are files of Python."""
    spec = _find(name)
    assert spec is not None
    return spec.loader


def _find_elsewhere(name: str) -> ModuleSpec | None:
    """Return where other finders find a top-level package."""
    for finder in sys.meta_path:
        find_spec = None if _is_ours(finder) else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find_spec(name, None) if find_spec else None
        if spec:
            return spec
    return None


def _is_ours(finder: object) -> bool:
    """Return whether a finder is one of this module, or of a copy of it."""
    return type(finder).__module__ == __name__


def _is_lightning(spec: ModuleSpec | None) -> bool:
    """Return whether a package `lightning` is Lightning's, and not one of the user's own."""
    folders = (spec and spec.submodule_search_locations) or ()
    return any(os.path.isfile(f"{folder}/pytorch/__init__.py") for folder in folders)  # noqa: PTH113
