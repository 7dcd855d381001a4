"""Launches one SageMaker training job of the image, and follows it to its end.

In a checkout, it is `python scripts/launch.py`. It has commands for existing jobs: list, logs JOB,
stop JOB, resume JOB, follow JOB, cost JOB; and completion, for a shell; `... COMMAND --help` says
more.

    sagemaker-lightning-launch --image=URI --role=ARN --output=s3://BUCKET/PREFIX \\
        [FLAG]... [KEY=VALUE]...

    sagemaker-lightning-launch --image="$(scripts/image_uri.sh)" \\
        --role=arn:aws:iam::123456789012:role/SageMaker \\
        --channel=training=s3://my-bucket/cifar10/ --output=s3://my-bucket/jobs \\
        --instance-type=ml.g5.xlarge --spot --checkpoints=s3://my-bucket/checkpoints/run-1 \\
        --max-run=7200 --max-wait=14400 \\
        trainer.max_epochs=20 data.batch_size=256 optimizer=Adam optimizer.lr=1e-3

KEY=VALUE is a hyperparameter: a flag of the application (`python app/train.py --help`) without its
dashes. The first = ends the key; everything after it is the value. A channel may have options after
commas:

    NAME=s3://BUCKET/PREFIX[,mode=File|FastFile]
        [,distribution=FullyReplicated|ShardedByS3Key][,group=NAME]
    NAME=efs://fs-ID/FOLDER[,access=ro|rw]
    NAME=fsx://fs-ID/MOUNT-NAME/FOLDER[,access=ro|rw]

group is the name of an --instance-group, and may be repeated; the first of each is the default. A
file system needs a VPC.

--defaults=FILE takes flags from a file, in TOML: `max-run = "12h"`, `spot = true`, a list or a
table for what may be repeated, and a table [hyperparameters]. What is given here comes before it.

--dry-run prints the request as JSON and starts nothing. --drill first runs the job's first steps on
this machine, left alone and interrupted (sagemaker_lightning/drill/command.py), and starts the job
only if all these runs end alike. A job with channels needs --drill-data=NAME=FOLDER for it.

Before the job costs anything, the launcher checks the request against SageMaker's service model,
the flags against each other, the hyperparameters against the application's own parser, and that the
input data, the buckets and the image exist in the job's region. It prints a line for each thing
that it cannot check. It prints what the job will cost if it knows a price; --budget ends the job
before it costs more. Then it prints the job's status changes and log lines, and at the end the
duration, the billable seconds and what spot saved, or why the job failed. Ctrl-C stops following,
not the job.

Exit status: 0 if the job completed, 1 if it did not or if something is wrong, 2 for a mistake in
the flags, 130 after Ctrl-C. Needs boto3 (`make env` installs it into .venv), and AWS credentials to
launch.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from sagemaker_lightning.contract.command_line import Parser
from sagemaker_lightning.contract.errors import plain
from sagemaker_lightning.launcher import (
    account_checks,
    aws,
    capacity,
    completion,
    contradictions,
    costs,
    defaults,
    drill,
    hyperparameter_check,
    job_request,
    jobs,
    request_validation,
    sites,
)
from sagemaker_lightning.launcher.services import Request

# Flags that the command line or the file of defaults must have.
NEEDED = ("image", "role", "output")
# The width of what --help says of a command.
HELP_COLUMNS = 78
SECONDS_OF = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class LaunchParser(Parser):
    """Says of a hyperparameter that was typed as a flag what to do.

    Args:
        source: The file that it parses; "" for the command line.
    """

    def __init__(self, *, source: str = "", **arguments: Any) -> None:
        super().__init__(**arguments)
        self.source = f"{source}: " if source else ""

    def error(self, message: str) -> NoReturn:
        """Print the error line, without the usage, and exit with status 2."""
        is_flag = message.startswith("unrecognized arguments: --")
        hint = "; a hyperparameter has no dashes: KEY=VALUE" if is_flag else ""
        super().error(f"{self.source}{message}{hint}")


def positive(text: str) -> int:
    """Return `text` as an integer above 0; ArgumentTypeError if it is anything else."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number above 0")
    return int(text)


def duration(text: str) -> int:
    """Return a duration in seconds, e.g. `12h`, or seconds as they are.

    Raises ArgumentTypeError if it is not above 0.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)([smhd]?)", text, re.ASCII)
    seconds = float(match[1]) * SECONDS_OF[match[2]] if match else 0.0
    if seconds < 1 or not seconds.is_integer():
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a whole number of seconds above 0, or a duration such as "
            "90m, 12h or 2d"
        )
    return int(seconds)


def add_repeated(
    add: Callable[..., argparse.Action], flag: str, metavar: str, help_text: str
) -> None:
    """Add a flag that may be repeated, with `add`, a parser's or a group's add_argument."""
    add(
        flag,
        action="append",
        default=[],
        metavar=metavar,
        help=f"{help_text}; may be repeated",
    )


def add_region(add: Callable[..., argparse.Action], otherwise: str = "") -> None:
    """Add the flags of region and profile; `otherwise` is what the region's help adds."""
    add("--region", help=f"(default: AWS_REGION, AWS_DEFAULT_REGION, the AWS profile's{otherwise})")
    add("--profile", metavar="NAME", help="of the AWS configuration (default: AWS_PROFILE)")


def add_limits(add: Callable[..., argparse.Action]) -> None:
    """Add the flags that give a resumed job other limits."""
    add("--max-run", type=duration, metavar="DURATION", help="e.g. 12h (default: as JOB's)")
    add(
        "--max-wait",
        type=duration,
        metavar="DURATION",
        help="of a spot job, running included (default: as JOB's)",
    )


def add_waits(add: Callable[..., argparse.Action]) -> None:
    """Add the flags that say what happens for want of instances."""
    add(
        "--capacity-wait",
        type=duration,
        default=0,
        metavar="DURATION",
        help="start the job again while AWS has no instances for it, for so long at most",
    )
    add(
        "--on-demand-after",
        type=duration,
        default=0,
        metavar="DURATION",
        help="stop a spot job that has waited for instances so long, and continue on demand",
    )


def add_poll(add: Callable[..., argparse.Action]) -> None:
    """Add the flag that says how often a job is looked at."""
    add(
        "--poll",
        type=positive,
        default=10,
        metavar="SECONDS",
        help="between two looks (default: %(default)s)",
    )


def parser(source: str = "") -> argparse.ArgumentParser:
    """Return the parser of the launcher's flags.

    Args:
        source: The file that it is to parse; "" for the command line.
    """
    flag_parser = LaunchParser(
        source=source,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flag_parser.add_argument(
        "hyperparameters", nargs="*", metavar="KEY=VALUE", help="hyperparameters"
    )
    add_flags(flag_parser)
    return flag_parser


def add_flags(flag_parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a job, and how it is launched."""
    add = flag_parser.add_argument_group("what runs").add_argument
    add(
        "--image",
        metavar="URI",
        help="needed: the image in Amazon ECR; in a checkout, scripts/image_uri.sh prints it",
    )
    add("--role", metavar="ARN", help="needed: the IAM role that the job has")
    add("--job-name", metavar="NAME", help="(default: the image's name and the time)")
    add_repeated(
        add,
        "--env",
        "NAME[=VALUE]",
        "an environment variable; NAME alone takes the value from this environment, and shows it "
        "nowhere",
    )
    add_repeated(add, "--metric", "NAME=REGEX", "a metric besides the image's own")
    add_repeated(add, "--tag", "KEY=VALUE", "a tag of the job")
    add = flag_parser.add_argument_group("data").add_argument
    add_repeated(add, "--channel", "NAME=ADDRESS", "input data: see above")
    add("--output", metavar="S3URI", help="needed: where model.tar.gz and output.tar.gz go")
    add("--output-kms-key", metavar="KEY", help="the KMS key for these: its ID, alias or ARN")
    add("--checkpoints", metavar="S3URI", help="where checkpoints go, and come from")
    add = flag_parser.add_argument_group("where").add_argument
    add_region(add, ", the image's")
    add("--instance-type", metavar="TYPE", help="(default: ml.g5.xlarge)")
    add("--instance-count", type=positive, metavar="N", help="(default: 1)")
    add_repeated(add, "--instance-group", "NAME=TYPE:COUNT", "instead of both")
    add_repeated(
        add,
        "--instance-preference",
        "TYPE[:COUNT][,plan=ARN]",
        "instead of --instance-type: the job has the first that has capacity, 5 at most",
    )
    add(
        "--volume-size",
        type=positive,
        default=30,
        metavar="GB",
        help="storage of an instance (default: %(default)s)",
    )
    add("--volume-kms-key", metavar="KEY", help="the KMS key that encrypts it, by ID or ARN")
    add("--training-plan", metavar="ARN", help="the plan whose reserved capacity the job has")
    add_repeated(add, "--subnet", "ID", "a subnet of the VPC")
    add_repeated(add, "--security-group", "ID", "a security group")
    add(
        "--network-isolation",
        action="store_true",
        help="no network for the program but that between its hosts",
    )
    add = flag_parser.add_argument_group("how long").add_argument
    add(
        "--max-run",
        type=duration,
        default=86400,
        metavar="DURATION",
        help="e.g. 90m, 12h, 2d, or seconds (default: %(default)s, a day)",
    )
    add(
        "--spot",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="on spot instances; needs --checkpoints, or --yes",
    )
    add(
        "--max-wait",
        type=duration,
        metavar="DURATION",
        help="of a spot job, running included (default: twice --max-run)",
    )
    add(
        "--retries",
        type=positive,
        metavar="N",
        help="restarts after an internal server error, 1 to 30",
    )
    add(
        "--keep-alive",
        type=duration,
        metavar="DURATION",
        help="keep the instances for the next job (a warm pool)",
    )
    costs.add_flags(
        flag_parser.add_argument_group("what it costs").add_argument, duration, positive
    )
    add = flag_parser.add_argument_group("this command").add_argument
    defaults_flag = add("--defaults", metavar="FILE", help="TOML with flags; the command line wins")
    defaults_flag.complete = completion.FILES  # type: ignore[attr-defined]  # shtab reads it
    add(
        "--yes",
        action="store_true",
        help="start although an interruption loses all: --spot or --budget without --checkpoints",
    )
    add("--dry-run", action="store_true", help="print the request as JSON, start nothing")
    add(
        "--drill",
        action="store_true",
        help="interrupt its first steps here before, in the image or in this checkout",
    )
    add_repeated(add, "--drill-data", "NAME=FOLDER", "a channel's data for it")
    add("--no-follow", action="store_true", help="start the job and leave")
    add_waits(add)
    add_poll(add)
    add(
        "--check-hyperparameters",
        choices=("local", "image", "no"),
        default="local",
        help=(
            "by the checkout's parser, by that of --image with docker, or not (default: "
            "%(default)s); --drill, too"
        ),
    )


def parse(words: list[str]) -> argparse.Namespace:
    """Return the flags of a command line, and those of its --defaults where it has others.

    Exits with status 2 after a line for a mistake in either; ValueError for a file that cannot be
    read.
    """
    finder = Parser(add_help=False, allow_abbrev=False)
    finder.add_argument("--defaults")
    path = finder.parse_known_args(words)[0].defaults
    of_file = None
    listed: dict[str, list[str]] = {}
    if path:
        blank = vars(parser().parse_args([]))
        blank = {name.replace("_", "-"): value for name, value in blank.items()}
        del blank["defaults"], blank[defaults.HYPERPARAMETERS]
        of_file = parser(path).parse_intermixed_args(defaults.read(path, blank))
        listed = {name: value for name, value in vars(of_file).items() if isinstance(value, list)}
        for name in listed:
            setattr(of_file, name, [])
        # argparse takes a positional argument only where the namespace does not have it yet.
        delattr(of_file, defaults.HYPERPARAMETERS)
    flag_parser = parser()
    args = flag_parser.parse_intermixed_args(words, of_file)
    for name, texts in listed.items():
        setattr(args, name, defaults.over(name, texts, getattr(args, name)))
    if missing := [f"--{name}" for name in NEEDED if getattr(args, name) is None]:
        if alone := [word for word in args.hyperparameters if "=" not in word]:
            flag_parser.error(
                f"found {plain(alone[0])!r}, expected KEY=VALUE, or one of the commands "
                f"{', '.join(COMMANDS)} as the first word"
            )
        flag_parser.error(f"the following arguments are required: {', '.join(missing)}")
    return args


COMMANDS = {
    "list": "print the newest training jobs: when they were made, status and name",
    "logs": "print the log of a job",
    "stop": "stop a job, which has two minutes to save a checkpoint",
    "resume": "continue from the checkpoints of a job that was stopped or failed, or whose time "
    "was over: the same request and checkpoints, under a new name",
    "follow": "print what happens to a job until it ends, as after its start",
    "cost": "print what a job has cost, or costs so far",
    "completion": "print the script by which a shell completes commands and flags",
}
EXAMPLES = {
    "list": "list --region=us-east-1",
    "logs": "logs my-job --follow",
    "stop": "stop my-job",
    "resume": "resume my-job --max-run=86400",
    "follow": "follow my-job",
    "cost": "cost my-job --prices=prices.csv",
    "completion": "completion bash > ~/.local/share/bash-completion/completions/"
    "sagemaker-lightning-launch",
}


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the commands for existing jobs."""
    all_commands = Parser(allow_abbrev=False)
    add_commands(all_commands)
    return all_commands


def add_commands(all_commands: argparse.ArgumentParser) -> None:
    """Add the commands for existing jobs, each a parser of its own."""
    program = Path(sys.argv[0]).name
    commands = all_commands.add_subparsers(
        dest="command", required=True, parser_class=Parser, metavar="COMMAND"
    )
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            allow_abbrev=False,
            description=textwrap.fill(f"{text[0].upper()}{text[1:]}.", HELP_COLUMNS),
            epilog=f"example: {program} {EXAMPLES[name]}",  # one line, to be copied
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = command.add_argument
        if name == "list":
            add(
                "--last",
                type=positive,
                default=20,
                metavar="N",
                help="as many, at most (default: %(default)s)",
            )
        elif name == "completion":
            add("shell", choices=completion.SHELLS)
            continue
        else:
            add("job", metavar="JOB")
        add_region(add)
        if name == "logs":
            add("--follow", action="store_true", help="until the job ends, with its status")
        if name == "resume":
            add_limits(add)
            add("--dry-run", action="store_true", help="print the request as JSON, start nothing")
            add("--no-follow", action="store_true", help="start the job and leave")
            add_waits(add)
        if name in ("logs", "resume", "follow"):
            add_poll(add)
        if name == "cost":
            costs.add_prices(add)
            command.set_defaults(spot_price=None)


def show_completion(shell: str) -> None:
    """Print the script by which a shell completes commands and flags."""
    everything = Parser(allow_abbrev=False)
    add_flags(everything)
    add_commands(everything)
    completion.show(everything, completion.program_name("sagemaker-lightning-launch"), shell)


def run_command(args: argparse.Namespace) -> int:
    """Run a command for an existing job; return the exit status."""
    if args.command == "completion":
        show_completion(args.shell)
        return 0
    aws.use_profile(args.profile)
    site = sites.of_region(aws.region(args.region), args.profile)
    if args.command == "list":
        jobs.show_list(site, args.last)
    elif args.command == "stop":
        jobs.stop(site, args.job)
    elif args.command == "follow" or (args.command == "logs" and args.follow):
        return jobs.follow(site, args.job, args.poll)
    elif args.command == "cost":
        job = jobs.describe(site, args.job)
        for line in costs.describe_job(args, job, datetime.now(UTC)):
            print(line)
    elif args.command == "logs":
        jobs.show_log(site, args.job)
    else:
        request = jobs.to_resume(site, args.job, args.max_run, args.max_wait)
        request_validation.validate(request)
        check_waits(request, args)
        return run_request(site, request, args)
    return 0


def check_waits(request: Request, args: argparse.Namespace) -> None:
    """Raise ValueError if the flags of `add_waits` do not fit a request, before anything runs."""
    capacity.check(request, args.capacity_wait, args.on_demand_after, not args.no_follow)


def run_request(site: sites.Site, request: Request, args: argparse.Namespace) -> int:
    """Start and follow the job of a request, as the flags say; return the exit status.

    A request that is printed has no value of its hidden variables.
    """
    if args.dry_run:
        print(json.dumps(job_request.without_values(request), indent=2))
        return 0
    if args.no_follow:
        jobs.start(site, request)
        return 0
    return capacity.follow(site, request, args.poll, args.capacity_wait, args.on_demand_after)


def main() -> None:
    """Run a command for an existing job, or check, drill, launch and follow a job."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        args = command_parser().parse_args()
        with aws.reported():
            sys.exit(run_command(args))
    with aws.reported():
        args = parse(sys.argv[1:])
        contradictions.check_flags(args)
        costs.check_flags(args)
        aws.use_profile(args.profile)
        image = aws.ECR.fullmatch(args.image)
        region = aws.region(args.region, otherwise=image and image["region"])
        contradictions.check_places(args, region)
        args.max_run = costs.limit_run(args, job_request.resources(args))
        request = job_request.build(args)
        request_validation.validate(request)
        check_waits(request, args)
        site = sites.of_region(region, args.profile)
        cost = costs.describe(args, request, site)
        notes = hyperparameter_check.check(request, args.check_hyperparameters)
        notes += account_checks.check(request, region, dry_run=args.dry_run)
        for note in notes:
            print(f"not checked: {note}", file=sys.stderr)
        for line in job_request.open_secrets(request):
            print(f"--env: {line}", file=sys.stderr)
        # After the checks: a mistake takes one line.
        for line in cost:
            print(line, file=sys.stderr)
        if args.drill:
            data = job_request.pairs("--drill-data", args.drill_data)
            data = {name: str(Path(folder).absolute()) for name, folder in data.items()}
            drill.run(request, args.check_hyperparameters, data)
        sys.exit(run_request(site, request, args))


if __name__ == "__main__":
    main()
