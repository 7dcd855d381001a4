"""What a job will cost, or has cost: hours, prices, checkpoints, and what a budget allows.

Prices are what --price, --spot-price and the user's file of --prices say; without them, those on
demand are this package's own list, if it has the job's types.
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sagemaker_lightning.contract.deadlines import SAGEMAKER_KILLS
from sagemaker_lightning.contract.errors import plain
from sagemaker_lightning.launcher import jobs, prices
from sagemaker_lightning.launcher.follower import ENDED
from sagemaker_lightning.launcher.services import InstanceGroup, Job, Request, ResourceConfig
from sagemaker_lightning.launcher.sites import Site

HOUR = 3600.0
# Seconds from the loss of an instance to the first new step, at a guess: instance, image, data,
# checkpoint, imports.
RESTART_SECONDS = 300.0
# The metric of the number of steps (job_request.METRICS).
STEP = "step"


@dataclass(frozen=True)
class Spot:
    """What a job takes on spot instances.

    Attributes:
        seconds: Expected, with checkpoints, repeated steps and restarts.
        interval: Seconds from one checkpoint to the next; None without checkpoints.
    """

    seconds: float
    interval: float | None


@dataclass(frozen=True)
class Hour:
    """What an hour of all instances of a job costs.

    Attributes:
        on_demand: On demand.
        spot: On spot; None where it is not known.
        currency: The currency of both; "" where it is not known.
        notes: Lines on where this comes from.
    """

    on_demand: float
    spot: float | None
    currency: str = ""
    notes: tuple[str, ...] = ()


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags of the cost that need each other, or exclude each other."""
    for is_wrong, line in (
        (
            args.budget is not None and args.price is None and not args.prices,
            "--price: found none, but --budget needs that of your region; give the price of an "
            "instance hour on demand, or a file with --prices",
        ),
        (
            bool(args.steps) != bool(args.like),
            "--steps, --like: found one of them, expected both or none: the steps of this job, "
            "and a job whose steps per second are known",
        ),
        (
            bool(args.expect and args.steps),
            "--expect: not allowed with --steps; leave one of them out",
        ),
        (
            bool(args.interrupted_every) and not args.spot,
            "--interrupted-every: found without --spot; give both or neither",
        ),
        (
            args.budget is not None and not (args.checkpoints or args.yes),
            "--budget: needs --checkpoints=s3://BUCKET/PREFIX, or what is stopped is lost; --yes "
            "starts the job all the same",
        ),
    ):
        if is_wrong:
            raise ValueError(line)


def limit_run(args: argparse.Namespace, resources: ResourceConfig) -> int:
    """Return the seconds that a job may run: --max-run, or less where --budget pays for less.

    The service then stops the job with a checkpoint, whoever still follows it. The time from
    SIGTERM to SIGKILL is paid from the budget, too; the start-up is not known.

    Args:
        args: The launcher's flags.
        resources: ResourceConfig of the request.

    Raises ValueError if the budget pays for no training.
    """
    paid = _paid_seconds(args, resources)
    if paid < 1:
        raise ValueError(
            f"--budget: found {args.budget:g}, expected enough for more than the "
            f"{SAGEMAKER_KILLS:.0f} s of the last checkpoint, on all instances"
        )
    return int(min(args.max_run, paid))


def _paid_seconds(args: argparse.Namespace, resources: ResourceConfig) -> float:
    """Return the seconds of training that --budget pays for, infinite without a budget."""
    hour = hour_of(args, resources) if args.budget is not None else None
    if hour is None:
        return math.inf
    stays_on_spot = args.spot and not args.on_demand_after
    price = hour.spot if stays_on_spot and hour.spot is not None else hour.on_demand
    return args.budget / price * HOUR - SAGEMAKER_KILLS if price else math.inf


def hour_of(args: argparse.Namespace, resources: ResourceConfig) -> Hour | None:
    """Return what an hour of a ResourceConfig costs; None if nobody has said it.

    It is the dearest's where the job gets one of several types (InstancePreferences).

    Raises ValueError if what the flags say has no price of a type.
    """
    choices = _choices(resources)
    types = _types(choices)
    if args.price is not None:
        if len(types) > 1:
            raise ValueError(
                "--price: found one price, but instances of several types: "
                f"{', '.join(types)}; --prices=FILE has one for each"
            )
        count = choices[0][types[0]]
        return Hour(
            args.price * count, None if args.spot_price is None else args.spot_price * count
        )
    listed = prices.read(args.prices or prices.OWN)
    if missing := [name for name in types if name not in listed]:
        if not args.prices:
            return None
        raise ValueError(
            f"--prices: found no price of {', '.join(missing)} in {args.prices}; add it, or give "
            "--price"
        )
    hour = max(
        (_hour_of_choice(choice, listed, args.spot_price) for choice in choices),
        key=lambda hour: hour.on_demand,
    )
    dearest = (f"of {', '.join(types)}, the dearest",) if len(choices) > 1 else ()
    caution = () if args.prices else (prices.CAUTION,)
    return Hour(hour.on_demand, hour.spot, hour.currency, (*dearest, *hour.notes, *caution))


def _types(choices: Sequence[Mapping[str, int]]) -> list[str]:
    return sorted({name for choice in choices for name in choice})


def _choices(resources: ResourceConfig) -> list[Mapping[str, int]]:
    """Return what a job may run on: for each choice, how many instances of each type.

    A job without instances of its own has no choice.
    """
    if preferences := resources.get("InstancePreferences"):
        count = resources.get("InstanceCount", 0)
        return [{each["InstanceType"]: each.get("InstanceCount", count)} for each in preferences]
    counts: Counter[str] = Counter()
    groups: Sequence[InstanceGroup | ResourceConfig]
    groups = resources.get("InstanceGroups") or [resources]
    if "InstanceType" not in groups[0]:
        return []
    for group in groups:
        counts[group["InstanceType"]] += group["InstanceCount"]
    return [counts]


def _hour_of_choice(
    choice: Mapping[str, int], listed: Mapping[str, prices.Price], spot_price: float | None
) -> Hour:
    used = {name: listed[name] for name in choice}
    currencies = sorted({price.currency for price in used.values()})
    if len(currencies) > 1:
        raise ValueError(f"--prices: found {' and '.join(currencies)}, expected one currency")
    spot = [price.spot if spot_price is None else spot_price for price in used.values()]
    known = [price for price in spot if price is not None]
    counts = choice.values()
    return Hour(
        sum(price.on_demand * choice[name] for name, price in used.items()),
        None
        if len(known) < len(spot)
        else sum(price * count for price, count in zip(known, counts, strict=True)),
        currencies[0],
        tuple(f"{name}: prices of {price.origin}" for name, price in used.items()),
    )


def describe(args: argparse.Namespace, request: Request, site: Site) -> list[str]:
    """Return the lines to print of what a job will cost; none where nothing says it.

    Raises ValueError if a flag needs a price and there is none, or if the job of --like says
    nothing of its steps.
    """
    hour = hour_of(args, request["ResourceConfig"])
    if hour is None:
        if args.expect or args.steps or args.spot_price is not None:
            raise ValueError(
                "--price: found none, but --expect, --steps and --spot-price need it, and the "
                f"package's list has none of {_named(request['ResourceConfig'])}; give the price "
                "of an instance hour on demand, or a file with --prices"
            )
        return []
    limit = request["StoppingCondition"]["MaxRuntimeInSeconds"]
    expected = args.expect or (args.steps and args.steps / steps_per_second(site, args.like))
    seconds = min(expected or limit, limit)
    rows = [("on demand", hour.on_demand, seconds)]
    notes = [*hour.notes]
    if expected and expected > limit:
        notes.append(
            f"it is expected to take {_hours(expected)} h; it is stopped after {_hours(limit)} h, "
            "with a checkpoint if it has a place for them (--max-run, --budget)"
        )
    elif not expected:
        notes.append("at most: --expect, or --steps and --like, say what is likely")
    if args.spot and hour.spot is not None:
        spot = Spot(seconds, None)
        if args.interrupted_every:
            saves = args.save_time if args.checkpoints else None
            spot = on_spot(seconds, args.interrupted_every, saves)
            notes += _spot_notes(spot, args)
            if expected and spot.seconds > limit:
                notes.append(
                    f"on spot it is stopped after {_hours(limit)} h of training (--max-run, "
                    "--budget), before its end"
                )
        rows.append(("on spot", hour.spot, spot.seconds))
    elif args.spot:
        notes.append(
            "no line for spot: SageMaker does not publish its prices; --spot-price says what you "
            "have paid"
        )
    table = [f"{'':12}{'per hour':>10}{'hours':>10}{f'cost {hour.currency}'.rstrip():>12}"]
    table += [
        f"{name:12}{per_hour:>10.2f}{_hours(each):>10}{_cost(per_hour * each / HOUR):>12}"
        for name, per_hour, each in rows
    ]
    if _paid_seconds(args, request["ResourceConfig"]) < limit + 1:
        notes.append(
            f"--budget={args.budget:g} ends the training after {_hours(limit)} h; its start-up is "
            "paid besides"
        )
    return table + notes


def describe_job(args: argparse.Namespace, job: Job, now: datetime) -> list[str]:
    """Return the lines to print of what a job has cost, or costs so far.

    Args:
        args: The flags of the prices.
        job: DescribeTrainingJob's answer.
        now: The time.

    Raises ValueError without a price, or if the price of a type is not known.
    """
    resources = job.get("ResourceConfig", {})
    if "SelectedInstanceType" in resources:
        resources = {
            "InstanceType": resources["SelectedInstanceType"],
            "InstanceCount": resources["SelectedInstanceCount"],
        }
    if not _choices(resources):
        raise ValueError(
            f"JOB: found {plain(job['TrainingJobName'])}, which has no instances of its own "
            "(ServerlessJobConfig); what it costs is not said"
        )
    hour = hour_of(args, resources)
    if hour is None:
        raise ValueError(
            "--price, --prices: found neither, and the package's list has none of "
            f"{_named(resources)}; give the price of an instance hour on demand, or a file of "
            "prices"
        )
    status = job["TrainingJobStatus"]
    seconds: float = job.get("BillableTimeInSeconds", 0)
    notes = [*hour.notes]
    if status not in ENDED:
        started = job.get("TrainingStartTime", now)
        seconds = (now - started).total_seconds()
        notes.append(
            "it still runs: from the start of its training until now, at the price on demand"
        )
    elif job.get("EnableManagedSpotTraining"):
        notes.append("on spot: the service takes the discount from the billable time")
    pool = job.get("WarmPoolStatus", {}).get("ResourceRetainedBillableTimeInSeconds", 0)
    if pool:
        notes.append(f"{pool} s of it are those of its warm pool")
    (choice,) = _choices(resources)
    hosts = " + ".join(f"{count} x {name}" for name, count in choice.items())
    cost = f"{_cost(hour.on_demand * (seconds + pool) / HOUR)} {hour.currency}".rstrip()
    return [
        f"{job['TrainingJobName']}: {status}, {_hours(seconds + pool)} h of {hosts}, {cost}",
        *notes,
    ]


def _named(resources: ResourceConfig) -> str:
    return ", ".join(_types(_choices(resources)))


def _hours(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{seconds / HOUR:,.2f}"


def _cost(cost: float) -> str:
    return "–" if math.isinf(cost) else f"{cost:,.2f}"


def _spot_notes(spot: Spot, args: argparse.Namespace) -> list[str]:
    each = f"interrupted each {_hours(args.interrupted_every)} h, {RESTART_SECONDS:.0f} s a restart"
    if spot.interval is None:
        return [f"on spot without checkpoints, {each}: each interruption makes it start over"]
    return [
        f"on spot, {each}, {args.save_time:g} s a checkpoint: one each {spot.interval / 60:.1f} "
        "minutes costs the least time (Daly 2006)"
    ]


def steps_per_second(site: Site, name: str) -> float:
    """Return the steps per second of a job that has ended, its start included.

    Raises ValueError if there is no such job, or it has no metric `step`.
    """
    job = jobs.describe(site, name)
    if job["TrainingJobStatus"] not in ENDED:
        raise ValueError(f"--like: found {name}, which still runs; expected a job that has ended")
    metrics = {each["MetricName"]: each["Value"] for each in job.get("FinalMetricDataList", [])}
    seconds = job.get("TrainingTimeInSeconds", 0)
    if not metrics.get(STEP) or not seconds:
        raise ValueError(
            f"--like: found {name}, which has no steps in a metric {STEP!r}; give a job that this "
            "command has started, or --expect=DURATION"
        )
    return metrics[STEP] / seconds


def on_spot(seconds: float, interrupted_every: float, save: float | None) -> Spot:
    """Return what a job takes on spot instances, with the checkpoints that cost the least time.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006), has the interval and the time; the interval's
    first term is J. W. Young's of 1974. Interruptions are independent of one another.

    Args:
        seconds: Seconds of training, without interruptions.
        interrupted_every: Seconds from one interruption to the next, on average.
        save: Seconds that a checkpoint takes; None without checkpoints.
    """
    restarts = interrupted_every * _exp(RESTART_SECONDS / interrupted_every)
    if save is None:
        return Spot(restarts * (_exp(seconds / interrupted_every) - 1), None)
    ratio = save / (2 * interrupted_every)
    interval = interrupted_every
    if ratio < 1:
        factor = 1 + math.sqrt(ratio) / 3 + ratio / 9
        interval = math.sqrt(2 * save * interrupted_every) * factor - save
    # A checkpoint that takes no time is taken all the time.
    interval = min(max(interval, 1.0), seconds)
    part = _exp((interval + save) / interrupted_every) - 1
    return Spot(restarts * part * seconds / interval, interval)


def _exp(power: float) -> float:
    try:
        return math.exp(power)
    except OverflowError:
        return math.inf


def amount(text: str) -> float:
    """Return `text` as a number, 0 or more; ArgumentTypeError if it is anything else."""
    if not re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number, 0 or more")
    return float(text)


def add_prices(add: Callable[..., argparse.Action]) -> None:
    """Add the flags of the prices on demand, with `add`, as `add_flags` does."""
    add(
        "--price",
        type=amount,
        metavar="PRICE",
        help="of an instance hour on demand, in any currency",
    )
    add(
        "--prices",
        metavar="FILE",
        help=f"CSV or JSON with {', '.join(prices.COLUMNS)} for each type of instance, in place of "
        "--price, which comes before it (default: a list of the package's, which is printed with "
        "its date)",
    )


def add_flags(
    add: Callable[..., argparse.Action],
    duration: Callable[[str], int],
    positive: Callable[[str], int],
) -> None:
    """Add the flags of the cost, with `add`, a group's add_argument, and some of their types."""
    add_prices(add)
    add("--spot-price", type=amount, metavar="PRICE", help="of an instance hour on spot")
    add(
        "--budget",
        type=amount,
        metavar="AMOUNT",
        help="stops the job with a checkpoint before it costs more (a shorter --max-run)",
    )
    add("--expect", type=duration, metavar="DURATION", help="how long it is likely to train")
    add("--steps", type=positive, metavar="N", help="its steps; --like says how fast they are")
    add("--like", metavar="JOB", help="a job whose steps per second are those of this one")
    add(
        "--interrupted-every",
        type=duration,
        metavar="DURATION",
        help="between two spot interruptions, on average: prints the best checkpoint interval",
    )
    add(
        "--save-time",
        type=duration,
        default=10,
        metavar="DURATION",
        help="of one checkpoint (default: %(default)s s)",
    )
