"""The only place that may use a private name of Lightning, torch, torchmetrics or jsonargparse.

Exact resume needs what these packages have no public way for. Each module here is about one part
of one package. It says what the private name is, why it is needed, where it is defined, and what
to look at on an upgrade; to the rest of the application it gives public names of our own. ruff
(SLF001, PLC2701) and tests/test_compat.py hold this.

On an upgrade of Lightning or torch: run `make compat LIGHTNING=2.7.0` (a version); read what
`names.py` no longer finds, and the docstring of the module that needs it; then widen the range in
`versions.py`.

Nothing here imports the application. Nothing here is imported before its user needs the package
itself: torch and Lightning take seconds.
"""
