"""Commands for the jobs of a rehearsal that runs: list, logs, stop, report, rerun, resume.

They ask its endpoint, as any client does. Those that AWS has, too, are the launcher's.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

from sagemaker_lightning.contract.errors import plain
from sagemaker_lightning.launcher import follower, jobs
from sagemaker_lightning.launcher.sites import Site
from sagemaker_rehearsal import owner
from sagemaker_rehearsal.aws import clients
from sagemaker_rehearsal.jobs.record import Comparison, Fault, Interruption, Verdict
from sagemaker_rehearsal.report import goodput_data
from sagemaker_rehearsal.report.fault_verdict import describe_injection
from sagemaker_rehearsal.report.markup import clock
from sagemaker_rehearsal.report.summary import describe_interruption

POLL_SECONDS = 1.0
# A rehearsal that does not answer for so long has ended.
PATIENCE_SECONDS = 10.0


def site_of(endpoint: str, region: str) -> Site:
    """Return the rehearsal at an endpoint; ValueError if no rehearsal of this person's is there."""
    key = owner.key_of(clients.own(endpoint))
    return Site(
        name=f"{region} of the rehearsal at {endpoint}",
        client=partial(clients.client, endpoint=endpoint, region=region, key=key),
        program=f"{sys.executable} -m sagemaker_rehearsal",
        flag=f"--endpoint={endpoint} --region={region}",
        patience=PATIENCE_SECONDS,
    )


def show_report(site: Site | None, name: str, folder: Path, form: str, least: float | None) -> None:
    """Print what a job's report says first and its path, or its goodput as data.

    Args:
        site: The rehearsal; None if none has to run, as the folder says all.
        name: The job's name.
        folder: The folder of all reports.
        form: `text`, `json` or `csv`.
        least: The smallest goodput that is allowed, 0 to 1; None for any.

    Raises ValueError if the job has not ended or has no report, or if its goodput is too low.
    """
    job = jobs.describe(site, name) if site else None
    if job and job["TrainingJobStatus"] not in follower.ENDED:
        raise ValueError(
            f"JOB: found {name}, which is {job['SecondaryStatus']}; its report is written at its "
            "end"
        )
    data = goodput_data.read(folder, name)
    if form == "json":
        print(json.dumps(data, indent=2))
    elif form == "csv":
        print(goodput_data.as_csv(data), end="")
    else:
        if site:
            follower.report(site, job)
        else:
            print(plain(f"{name}: {data['status']} after {clock(data['seconds'])}"))
            if data["failure"]:
                print(plain(data["failure"]))
        _show_text(name, folder, data)
    sys.stdout.flush()
    if least is not None:
        goodput_data.check(data, least)


def _show_text(name: str, folder: Path, data: dict) -> None:
    """Print what the report of a job that has ended says, and where it is."""
    try:
        record = json.loads((folder / name / "job.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"JOB: the record of {name} cannot be read: {error}") from None
    share = "none" if data["goodput"] is None else f"{data['goodput']:.1%}"
    print(f"goodput: {share}, {data['steps_lost']} steps lost, {data['steps_redone']} done again")
    if results := record.get("results"):
        # In JSON, null stands for what is not finite.
        texts = ("nan" if value is None else f"{value:.6g}" for value in results.values())
        print(plain(" ".join(f"{name}={text}" for name, text in zip(results, texts, strict=True))))
    if comparison := data["comparison"]:
        print(plain(Comparison(**comparison).sentence))
    lines = [
        describe_interruption(record["created"], Interruption(**interruption))
        for interruption in record["interruptions"]
    ]
    lines += [describe_injection(record["created"], Fault(**fault)) for fault in record["faults"]]
    lines += [f"after its faults: {data['verdict']}"] if data["verdict"] else []
    lines += record["never_due"] + [f"note: {note}" for note in record["notes"]]
    for line in lines:
        print(plain(line))
    print(f"report: {folder / name / 'report.html'}", flush=True)


def show_comparison(site: Site, name: str, other: str, folder: Path) -> int:
    """Wait for the comparison of a job with another run, and print it.

    Args:
        site: The rehearsal.
        name: The job's name.
        other: The name of the run that is left alone.
        folder: The folder of all reports.

    Returns the exit status: 0 for the same bits.
    """
    print(f"{other} runs without interruptions, for the comparison", flush=True)
    while not (found := goodput_data.read(folder, name)["comparison"]):
        jobs.describe(site, other)  # an error, if the rehearsal has ended
        time.sleep(POLL_SECONDS)
    comparison = Comparison(**found)
    print(plain(comparison.sentence), flush=True)
    return 0 if comparison.verdict == Verdict.SAME_BITS else 1


def rerun(site: Site, name: str) -> None:
    """Start a job once more, from its beginning, under a new name.

    Its checkpoints are beside those of the other, in a folder with its own name.
    """
    request = jobs.again(site, jobs.describe(site, name))
    if config := request.get("CheckpointConfig"):
        config["S3Uri"] = clients.beside(config["S3Uri"], request["TrainingJobName"])
    _say_how_to_follow(site, jobs.start(site, request))


def resume(site: Site, name: str, max_run: int | None, max_wait: int | None) -> None:
    """Start a job that continues from another's checkpoints, as jobs.to_resume says."""
    _say_how_to_follow(site, jobs.start(site, jobs.to_resume(site, name, max_run, max_wait)))


def _say_how_to_follow(site: Site, name: str) -> None:
    print(f"to follow it: {site.command('logs', name)} --follow", file=sys.stderr)
