"""Starts the toolkit, with our hook, as its command `train` does; failures take one line.

    python -m sagemaker_lightning.launch.train_command

entrypoint.sh becomes this process for `train`. Without it, the toolkit answers with a traceback. In
an image that is not ours, it may be the entry point, or bash_env.sh becomes it.
"""

import importlib.util
import os
import sys
from pathlib import Path

from sagemaker_lightning.contract import failures, streams
from sagemaker_lightning.contract.log import say_last
from sagemaker_lightning.launch import ownership

HOOK = "sagemaker_lightning.launch.toolkit_hook:main"


def main() -> None:
    """Run the toolkit; exit with a status above 0 if the job did not end well."""
    streams.prepare()
    os.environ["SAGEMAKER_TRAINING_MODULE"] = HOOK  # AWS's images have another one
    base = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    failure = base / "output/failure"
    if importlib.util.find_spec("sagemaker_training") is None:
        _report(
            failure,
            "the training toolkit is not installed, which `train` needs: install it with this "
            "package, as sagemaker-lightning[toolkit]",
        )
        sys.exit(1)
    try:
        from sagemaker_training import environment, trainer

        # The toolkit's first step. It comes before launch/toolkit_hook.py, which cannot report it.
        environment.Environment()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        _report(
            failure,
            f"{base / 'input/config'}: the training toolkit cannot use what is there ({reason}); "
            "correct it",
        )
        sys.exit(1)
    try:
        trainer.train()
    finally:  # the toolkit leaves by SystemExit
        written = failures.written(failure)
        if written.startswith("Framework Error:"):
            reason = f"the training toolkit failed ({written.splitlines()[-1][:500]})"
            _report(failure, reason, written)
        ownership.give_to_owners(base)


def _report(failure: Path, reason: str, trace: str = "") -> None:
    """Print the reason, and write it and the end of `trace` to the failure file."""
    line = f"error: {reason}"
    say_last(line)
    try:
        failures.write(failure, line, trace, replaces=True)
    except OSError as unwritable:
        say_last(f"error: {failure} could not be written: {unwritable.strerror}")


if __name__ == "__main__":
    main()
