"""Serves pytorch_lightning.utilities.apply_func to Lightning Bolts 0.7.0, in every Python process.

Lightning 2.0 moved that module to lightning_utilities.core.apply_func; Bolts still imports it by
its old name. scripts/install_bolts.sh copies this file into the environment, and a .pth file beside
it imports it at each start: a finder that comes last, so that a module of that name is found first.
"""

import sys


class OldName:
    """Finds and fills the module of the old name; all other names are not ours."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of the module of the old name; None for any other."""
        if name != "pytorch_lightning.utilities.apply_func":
            return None
        from importlib.util import spec_from_loader

        return spec_from_loader(name, OldName)

    @staticmethod
    def create_module(spec):
        """Return None: Python makes the module itself."""

    @staticmethod
    def exec_module(module):
        """Give the module the names that the moved one has."""
        from lightning_utilities.core import apply_func

        names = (name for name in vars(apply_func) if not name.startswith("__"))
        vars(module).update((name, vars(apply_func)[name]) for name in names)


sys.meta_path.append(OldName)
