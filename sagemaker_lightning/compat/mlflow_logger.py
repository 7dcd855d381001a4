"""What a MLFlowLogger sends its points by, and to which run.

To ask the logger itself for its name or version makes a run.

On an upgrade: compare loggers/mlflow.py: when the run is made, and that all points go to the
client's `log_batch`.
"""

from typing import Any

from pytorch_lightning.loggers import MLFlowLogger


def client(logger: MLFlowLogger) -> Any:
    """Return what a logger sends its points by."""
    return logger._mlflow_client


def tracking_uri(logger: MLFlowLogger) -> str:
    """Return the address or the ARN of a logger's server."""
    return logger._tracking_uri


def send_by(logger: MLFlowLogger, client: Any) -> None:
    """Have a logger send its points by another client."""
    logger._mlflow_client = client


def experiment(logger: MLFlowLogger) -> str:
    """Return the name of a logger's experiment."""
    return logger._experiment_name


def run_id(logger: MLFlowLogger) -> str | None:
    """Return the id of a logger's run; None if it has not made the run yet."""
    return logger._run_id


def set_run_if_none(logger: MLFlowLogger, run_id: int | str) -> None:
    """Have a logger continue in a run, unless it has another."""
    logger._run_id = logger._run_id or run_id  # type: ignore[assignment]  # as it was given
