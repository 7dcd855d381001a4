"""What runs inside the training toolkit's own process: SAGEMAKER_TRAINING_MODULE=app.toolkit:main.

The toolkit imports and calls `main` in place of its own last step. It runs the program as the toolkit would, and sees
to it that no failure ends in exit status 0: sagemaker-training 5.1.4 leaves by `finally: sys.exit(exit_code)` with
exit_code still 0 where the failure file cannot be written or the hook leaves by SystemExit (trainer.py, `train`).
"""

import os
import sys

from sagemaker_training import entry_point, environment, files


class ProgramFailed(Exception):
    """The program did not end well; the toolkit reports any Exception, and exits with its `errno`."""

    errno = 1


def main() -> None:
    """Run the job's program; return if it ended well."""
    try:
        _run()
        files.write_success_file()
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        try:
            files.write_failure_file(reason)  # kept as it is where the program has written one
        except OSError as unwritable:
            sys.stderr.write(f"error: {reason}\nerror: output/failure could not be written: {unwritable}\n")
            sys.stderr.flush()
            os._exit(ProgramFailed.errno)
        raise ProgramFailed(reason) from None


def _run() -> None:
    job = environment.Environment()
    entry_point.run(job.module_dir, job.user_entry_point, job.to_cmd_args(), job.to_env_vars())
