"""The only place that may use private names of other packages.

These are Lightning, torch, torchmetrics and jsonargparse.

Exact resume needs what these packages have no public way for. Each module here is about one part of
one package. It says what the private name is, why it is needed, where it is defined, and what to
look at on an upgrade; it gives the rest of the application public names of our own. ruff (SLF001,
PLC2701) and test_compat.py hold this.

On an upgrade of Lightning or torch: run `make compat LIGHTNING=2.7.0` (a version); read what
`names.py` no longer finds, and the docstring of the module that needs it; then widen the range in
`versions.py`.

Nothing here imports the application. A module here is imported only when its user needs the package
itself: importing torch and Lightning takes seconds.
"""
