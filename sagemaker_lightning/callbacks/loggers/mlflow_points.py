"""A run of MLflow that is continued: a server keeps every point, and none can be removed.

A resumed run does again what the interrupted run did after the checkpoint, and logs it again: the
same points. So the checkpoint has how many points of each metric had been logged, and the server is
asked, once, for those that it got after these. Points that it has are not sent again.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import MLFlowLogger

from sagemaker_lightning.callbacks.loggers.base import RunContinuation, are_counts
from sagemaker_lightning.compat import mlflow_logger
from sagemaker_lightning.contract.log import log


class MLflowContinuation(RunContinuation):
    """The continuation of a MLFlowLogger."""

    serves = MLFlowLogger
    argument = "run_id"

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return mlflow_logger.experiment(self.logger)

    @property
    def version(self) -> str | None:
        """The id of the run."""
        return mlflow_logger.run_id(self.logger)

    def take_version(self, version: int | str) -> None:
        """Have the logger continue in a run, unless it has another."""
        mlflow_logger.set_run_if_none(self.logger, version)

    @property
    def points(self) -> "Points":
        """The client by which the logger sends its points; it becomes one of ours."""
        client = mlflow_logger.client(self.logger)
        if not isinstance(client, Points):
            client = Points(client)
            mlflow_logger.send_by(self.logger, client)
        return client

    def prepare(self, folder: Path | None) -> None:
        """Have `Points` send the points, if there are checkpoints to continue from."""
        if folder:
            _ = self.points

    def is_there(self, run_id: str) -> bool:
        """Return whether the server has a run; if not, print that a new one begins."""
        import mlflow
        from mlflow.exceptions import MlflowException

        # As the logger does before its first use; SageMaker's plugin asks for it.
        mlflow.set_tracking_uri(mlflow_logger.tracking_uri(self.logger))
        try:
            if mlflow_logger.client(self.logger).get_run(run_id).info.lifecycle_stage == "active":
                return True
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        log.warning(
            f"MLflow has no run {run_id}, which the interrupted run logged to: the curves "
            "begin in a new one"
        )
        return False

    def keep_back(self, run_id: str, trains: bool) -> None:
        """Keep points back until it is known which come again; before a training, send new ones."""
        if trains:
            self.points.wait(run_id)
        else:
            self.points.repeat(run_id)

    def state(self) -> dict[str, Any]:
        """Return how many points of each metric there are."""
        version = self.version
        return {"points": self.points.state(version)} if version else {}

    def takes(self, state: Mapping[str, Any]) -> bool:
        """Return whether the state has numbers of points, if there is a run."""
        return not state["version"] or are_counts(state.get("points"))

    def cut_back(self, state: Mapping[str, Any], step: int, first: bool) -> None:
        """Send no point again that the server has."""
        if first and state["version"]:
            self.points.continue_from(state["version"], state["points"])

    def begin_anew(self) -> None:
        """Send the points that were kept back."""
        self.points.log_held()


class Points:
    """An MlflowClient that sends no point of a continued run twice.

    Args:
        client: The client that sends.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.runs: dict[str, _Run] = {}
        self.begun: set[str] = set()  # ids of runs whose repeated points are known
        # Points that wait until that is known.
        self.held: list[tuple[str, list[Any], bool | None]] | None = None
        self.sending: list[Any] = []  # what is sent in the background

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def log_metric(
        self,
        run_id: str,
        key: str,
        value: float,
        timestamp: int | None = None,
        step: int | None = None,
        synchronous: bool | None = None,
        **options: Any,
    ) -> Any:
        """Log a point, unless the server has it."""
        from mlflow.entities import Metric

        if timestamp is None:
            metric = Metric(key, value, time.time_ns() // 10**6, step or 0, **options)
            return self.log_batch(run_id, [metric], synchronous=synchronous)
        # A server knows a point again that is sent with the same time.
        return self.client.log_metric(
            run_id, key, value, timestamp, step, **_synchronous_argument(synchronous), **options
        )

    def log_batch(
        self,
        run_id: str,
        metrics: Sequence[Any] = (),
        params: Sequence[Any] = (),
        tags: Sequence[Any] = (),
        synchronous: bool | None = None,
    ) -> Any:
        """Log points, parameters and tags, but not what the interrupted run has logged.

        A parameter cannot change, and the text of one may: it may have an address in memory.
        """
        if self.held is None:
            run = self._run(run_id)
            metrics, known = run.new(metrics), run.params
        else:
            if metrics:
                self.held.append((run_id, list(metrics), synchronous))
            metrics, known = [], self.client.get_run(run_id).data.params
        params = [param for param in params if param.key not in known]
        if not (metrics or params or tags):
            return None
        operation = self.client.log_batch(
            run_id, metrics, params, tags, **_synchronous_argument(synchronous)
        )
        if operation is not None:
            self.sending.append(operation)
        return operation

    def wait(self, run_id: str) -> None:
        """Keep points back until `continue_from` or `log_held`, unless the run has begun."""
        if run_id not in self.begun:
            self.held = []

    def repeat(self, run_id: str) -> None:
        """Send no point that the server has, unless the run has begun.

        This is for what a program does before its training, such as a validation.
        """
        if run_id not in self.begun:
            self.runs[run_id] = self._read(run_id, {})

    def log_held(self) -> None:
        """Log the points that were kept back."""
        held = self.held or ()
        self.held = None
        for run_id, metrics, synchronous in held:
            self.log_batch(run_id, metrics, synchronous=synchronous)

    def continue_from(self, run_id: str, counts: Mapping[str, int]) -> None:
        """Continue a run after as many points of each metric as `counts` says.

        Points that were kept back are among them. If the server has fewer, a warning says so. A run
        that this process has begun continues by itself.
        """
        if run_id in self.begun:
            return
        self.held = None
        self.begun.add(run_id)
        run = self.runs[run_id] = self._read(run_id, counts)
        lacking = [key for key, count in counts.items() if run.there.get(key, 0) < count]
        if lacking:
            log.warning(
                f"MLflow's run {run_id} lacks points of the interrupted run: the curve of "
                f"{min(lacking)} has a gap"
            )
        self.client.update_run(run_id, status="RUNNING")

    def state(self, run_id: str) -> dict[str, int]:
        """Return how many points of each metric were logged; the server has them."""
        for operation in self.sending:
            operation.wait()
        self.sending = []
        return dict(self.runs[run_id].counts) if run_id in self.runs else {}

    def _run(self, run_id: str) -> "_Run":
        if run_id not in self.runs:
            self.begun.add(run_id)
            self.runs[run_id] = self._read(run_id, None)
        return self.runs[run_id]

    def _read(self, run_id: str, counts: Mapping[str, int] | None) -> "_Run":
        data = self.client.get_run(run_id).data
        histories = {
            key: sorted(
                (point.timestamp, point.step)
                for point in self.client.get_metric_history(run_id, key)
            )
            for key in data.metrics
        }
        return _Run(histories, data.params, counts)


class _Run:
    """What a run has on the server.

    Args:
        histories: Its points by metric, in the order of their times, each as (time in milliseconds,
            step).
        params: Its parameters.
        counts: How many of the points of each metric are not logged again; None for all.
    """

    def __init__(
        self,
        histories: Mapping[str, Sequence[tuple[int, int]]],
        params: Mapping[str, str],
        counts: Mapping[str, int] | None,
    ) -> None:
        self.there = {key: len(points) for key, points in histories.items()}
        self.counts = dict(self.there if counts is None else counts)
        self.ahead = {
            key: [step for _, step in points[self.counts.get(key, 0) :]]
            for key, points in histories.items()
        }
        self.params = params
        self.latest = max(
            (point[0] for points in histories.values() for point in points), default=0
        )

    def new(self, metrics: Sequence[Any]) -> list[Any]:
        """Return the points that the server does not have, each with a time of its own.

        Two points of a metric with one time, step and value would be one for the server.
        """
        kept = [metric for metric in metrics if not self._repeats(metric.key, metric.step)]
        if kept:
            self.latest = max(self.latest + 1, *(metric.timestamp for metric in kept))
        return [
            type(metric).from_dictionary(dict(metric) | {"timestamp": self.latest})
            for metric in kept
        ]

    def _repeats(self, key: str, step: int) -> bool:
        """Return whether the server has this point, and take it off those that come again."""
        ahead = self.ahead.get(key, [])
        if step in ahead:
            passed = ahead.index(step) + 1
            del ahead[:passed]
            self.counts[key] = self.counts.get(key, 0) + passed
            return True
        if ahead and step < max(ahead):
            return True  # it is logged by the clock: the curve has points of the interrupted run
        self.counts[key] = self.counts.get(key, 0) + len(ahead) + 1
        ahead.clear()
        return False


def _synchronous_argument(synchronous: bool | None) -> dict[str, bool]:
    """Return the argument if there is one: MLflow before 2.8 has no such argument."""
    return {} if synchronous is None else {"synchronous": synchronous}
