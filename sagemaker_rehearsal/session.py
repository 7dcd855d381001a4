"""Runs a rehearsal until Ctrl-C: engine, endpoint, live view, reports."""

import tempfile
import threading
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from docker.errors import DockerException

from sagemaker_lightning.contract.atomic_files import atomic_write, json_text
from sagemaker_lightning.contract.errors import plain
from sagemaker_rehearsal import guard, server, single_job
from sagemaker_rehearsal.api import sockets
from sagemaker_rehearsal.api.account import Account
from sagemaker_rehearsal.api.service import ACCOUNT, Service
from sagemaker_rehearsal.aws import clients as cloud
from sagemaker_rehearsal.aws.access_keys import Keys
from sagemaker_rehearsal.engines.containers import Containers
from sagemaker_rehearsal.engines.processes import IS_CHECKOUT, Processes, job_python
from sagemaker_rehearsal.jobs.job import JobContext
from sagemaker_rehearsal.jobs.record import Comparison, Record, Verdict
from sagemaker_rehearsal.owner import Owner
from sagemaker_rehearsal.report import goodput_data, index, page
from sagemaker_rehearsal.report.live_view import View
from sagemaker_rehearsal.settings import Settings, prices_of_job
from sagemaker_rehearsal.web.access import TOKEN


def serve(settings: Settings, ended: threading.Event, immediately: threading.Event) -> None:
    """Serve until `ended` is set; then stop all jobs and leave only the reports.

    Args:
        settings: The rehearsal's settings.
        ended: Ends the rehearsal.
        immediately: Gives the jobs no time to end by themselves.

    Raises ValueError if the job of --run failed, its goodput is below --fail-below, or --compare
    has found other bits.
    """
    request = single_job.read(settings.run) if settings.run else None
    _check_folder(settings.folder)
    owner = Owner()
    engine = None
    with guard.watched(owner.folder):
        try:
            engine = choose(settings, owner)
            client = getattr(engine, "client", None)
            for line in owner.end_orphans(client):
                print(line, flush=True)
            failed = _serve_endpoint(settings, (ended, immediately), owner, engine, request)
        finally:
            owner.close(getattr(engine, "client", None))
    if failed:
        raise ValueError(failed)
    if request and (settings.compare or settings.fail_below is not None):
        _check_end(settings, goodput_data.read(settings.folder, request["TrainingJobName"]))


def _check_folder(folder: Path) -> None:
    """Make the folder of reports; ValueError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--folder: found {folder}, where reports cannot be written: {error.strerror}"
        ) from error


def _check_end(settings: Settings, data: dict) -> None:
    """Print the comparison of the job of --run; ValueError if it ended as it must not."""
    if settings.compare and not data["comparison"]:
        print("not compared: nothing has disturbed the job", flush=True)
    elif settings.compare:
        comparison = Comparison(**data["comparison"])
        print(plain(comparison.sentence), flush=True)
        if comparison.verdict == Verdict.OTHER_BITS:
            raise ValueError(f"--compare: found {comparison.verdict}, expected the same bits")
    if settings.fail_below is not None:
        goodput_data.check(data, settings.fail_below)


def choose(settings: Settings, owner: Owner) -> Containers | Processes:
    """Return the engine that runs the jobs: Docker's, or processes.

    Prints a line if they run as processes; ValueError if --engine=docker finds no Docker.
    """
    if settings.engine != "processes":
        try:
            return Containers(owner.label, settings.gpus)
        except DockerException as error:
            if settings.engine == "docker":
                raise ValueError(f"--engine=docker: no Docker engine answers: {error}") from error
    processes = Processes(job_python(), owner.folder.name, owner.note_process)
    application = "this checkout's application" if IS_CHECKOUT else "programs of their own"
    why = "no Docker engine" if settings.engine == "auto" else f"--engine={settings.engine}"
    print(f"{why}: jobs run as processes, with {application}", flush=True)
    return processes


def _serve_endpoint(
    settings: Settings,
    events: tuple[threading.Event, threading.Event],
    owner: Owner,
    engine: Containers | Processes,
    request: dict | None,
) -> str | None:
    ended, immediately = events
    addresses = ["127.0.0.1"] + ([engine.bridge] if engine.bridge else [])
    keys = Keys()
    service = Service(settings, lambda region, job, name: place(region, job, name))

    def make_endpoint(port: int) -> server.Endpoint:
        own_clients = cloud.Clients(f"http://{addresses[0]}:{port}", keys.person)
        return server.Endpoint(service, keys, Account(own_clients, engine))

    with sockets.served(make_endpoint, settings.port, addresses, server.Handler) as port:
        address_here, for_jobs = (
            f"http://{address}:{port}" for address in (addresses[0], addresses[-1])
        )
        clients = cloud.Clients(address_here, keys.person)
        owner.keep(keys.person, [f"{address}:{port}" for address in addresses], settings.folder)

        def place(region: str, job: str, name: str) -> JobContext:
            return JobContext(
                engine=engine,
                clients=partial(clients, region),
                work=owner.jobs,
                variables=keys.of_job(job).variables
                | {"AWS_ENDPOINT_URL": for_jobs, "AWS_REGION": region}
                | {"TRAINING_JOB_NAME": name, "TRAINING_JOB_ARN": job},
                report=partial(write, settings),
            )

        variables = (
            {"AWS_ENDPOINT_URL": address_here}
            | keys.person.variables
            | {"AWS_DEFAULT_REGION": cloud.REGION}
        )
        print(
            f"endpoint: {address_here} (account {ACCOUNT})\nfor a browser: "
            f"{address_here}/?{urlencode({TOKEN: keys.page_token})}\nfor a client: export "
            f"{' '.join(f'{name}={value}' for name, value in variables.items())}\nreports: "
            f"{settings.folder}",
            flush=True,
        )
        with View(service.shown):
            failed = single_job.run(address_here, keys.person, request, ended) if request else None
            if not request:
                ended.wait()
            service.wait_for_comparisons(ended)
            service.close(immediately)
    # A request that was refused has no job.
    if request and service.jobs:
        print(f"report: {settings.folder / request['TrainingJobName'] / 'report.html'}", flush=True)
    return failed


def write(settings: Settings, record: Record, folder: Path) -> None:
    """Write a job's record, report and goodput into its folder."""
    prices = prices_of_job(settings, record.instance_types, record.spot)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json_text(record.as_json(), indent=1))
        data = goodput_data.describe(record.masked(), **prices)
        # A command may read it while a comparison is added.
        with atomic_write(folder / goodput_data.FILE_NAME, sync=False) as file:
            file.write(json_text(data, indent=1).encode())
        page.write(record, folder / "report.html", **prices)
        index.write(folder.parent)
    # The job ends as it would have ended with a report.
    except OSError as error:
        print(f"warning: the report of {record.name} could not be written: {error}", flush=True)
