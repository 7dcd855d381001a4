"""Starts the toolkit, as its command `train` does, and says in one line what it would answer with a traceback.

python -m sagemaker_lightning.launch.train_command     what entrypoint.sh becomes for `train`
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

from sagemaker_lightning.contract import failures


def main() -> None:
    """Run the toolkit; exits with a status above 0 if the job did not end well."""
    base = Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    failure = base / "output/failure"
    try:
        from sagemaker_training import environment, trainer

        environment.Environment()  # the toolkit's first step, which launch/toolkit_hook.py does not see
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        _tell(
            failure,
            f"{base / 'input/config'}: the training toolkit cannot use what is there ({reason}); correct it",
        )
        sys.exit(1)
    try:
        trainer.train()
    finally:  # it leaves by SystemExit
        with suppress(OSError):
            said = failure.read_text(errors="replace") if failure.is_file() else ""
            if said.startswith("Framework Error:"):
                _tell(
                    failure,
                    f"the training toolkit failed ({said.strip().splitlines()[-1][:500]})",
                    said,
                )


def _tell(failure: Path, reason: str, trace: str = "") -> None:
    line = f"error: {reason}"
    print(line, file=sys.stderr, flush=True)
    try:
        failures.write(failure, line, trace, mode="w")
    except OSError as unwritable:
        print(
            f"error: {failure} could not be written: {unwritable.strerror}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
