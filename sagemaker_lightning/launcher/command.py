"""Launches one SageMaker training job of the image, and follows it to its end.

    python scripts/launch.py --image=URI --role=ARN --output=s3://BUCKET/PREFIX \\
        [FLAG]... [KEY=VALUE]...

    python scripts/launch.py --image="$(scripts/image_uri.sh)" \\
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

group is the name of an --instance-group, and may be repeated; the first mode and the first
distribution are the defaults. --dry-run prints the request as JSON and starts nothing. --drill
first runs the job's first steps on this machine, left alone and interrupted
(sagemaker_lightning/drill/command.py), and starts the job only if all these runs end alike. A job
with channels needs --drill-data=NAME=FOLDER for it.

Before the job costs anything, the launcher checks the request against SageMaker's service model,
the flags against each other, the hyperparameters against the application's own parser, and that the
input data, the buckets and the image exist in the job's region. It prints a line for each thing
that it cannot check. Then it prints the job's status changes and log lines, and at the end the
duration, the billable seconds and what spot saved, or why the job failed. Ctrl-C stops following,
not the job.

Exit status: 0 if the job completed, 1 if it did not or if something is wrong, 2 for a mistake in
the flags, 130 after Ctrl-C. Needs boto3 (`make env` installs it into .venv), and AWS credentials to
launch.
"""

import argparse
import json
import sys
from pathlib import Path

from sagemaker_lightning.launcher import (
    account_checks,
    aws,
    contradictions,
    drill,
    follower,
    hyperparameter_check,
    job_request,
    request_validation,
)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line."""

    def error(self, message: str) -> None:
        """Print the error line, without the usage, and exit with status 2.

        For a hyperparameter that was typed as a flag, the line says what to do.
        """
        hint = ""
        if message.startswith("unrecognized arguments: --"):
            hint = "; a hyperparameter has no dashes: KEY=VALUE"
        self.exit(2, f"error: {message}{hint}; --help lists all flags\n")


def positive(text: str) -> int:
    """Return `text` as an integer above 0; ArgumentTypeError if it is anything else."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed is a whole number above 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's flags."""
    flag_parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flag_parser.add_argument(
        "hyperparameters", nargs="*", metavar="KEY=VALUE", help="hyperparameters"
    )
    add = flag_parser.add_argument_group("what runs").add_argument
    add(
        "--image",
        required=True,
        metavar="URI",
        help="the image in Amazon ECR; scripts/image_uri.sh prints it",
    )
    add("--role", required=True, metavar="ARN", help="the IAM role that the job has")
    add("--job-name", metavar="NAME", help="(default: the image's name and the time)")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable; may be repeated",
    )
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=REGEX",
        help="a metric besides the image's own; repeated",
    )
    add(
        "--tag",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a tag of the job; may be repeated",
    )
    add = flag_parser.add_argument_group("data").add_argument
    add(
        "--channel",
        action="append",
        default=[],
        metavar="NAME=S3URI",
        help="input data; may be repeated",
    )
    add("--output", required=True, metavar="S3URI", help="where model.tar.gz and output.tar.gz go")
    add("--checkpoints", metavar="S3URI", help="where checkpoints go, and come from")
    add = flag_parser.add_argument_group("where").add_argument
    add(
        "--region", help="(default: AWS_REGION, AWS_DEFAULT_REGION, the AWS profile's, the image's)"
    )
    add("--instance-type", metavar="TYPE", help="(default: ml.g5.xlarge)")
    add("--instance-count", type=positive, metavar="N", help="(default: 1)")
    add(
        "--instance-group",
        action="append",
        default=[],
        metavar="NAME=TYPE:COUNT",
        help="instead of both; repeated",
    )
    add(
        "--volume-size",
        type=positive,
        default=30,
        metavar="GB",
        help="storage of an instance (default: %(default)s)",
    )
    add(
        "--subnet",
        action="append",
        default=[],
        metavar="ID",
        help="a subnet of the VPC; may be repeated",
    )
    add(
        "--security-group",
        action="append",
        default=[],
        metavar="ID",
        help="a security group; may be repeated",
    )
    add = flag_parser.add_argument_group("how long").add_argument
    add(
        "--max-run",
        type=positive,
        default=86400,
        metavar="SECONDS",
        help="(default: %(default)s, a day)",
    )
    add("--spot", action="store_true", help="on spot instances; needs --checkpoints")
    add(
        "--max-wait",
        type=positive,
        metavar="SECONDS",
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
        type=positive,
        metavar="SECONDS",
        help="keep the instances for the next job (a warm pool)",
    )
    add = flag_parser.add_argument_group("this command").add_argument
    add("--dry-run", action="store_true", help="print the request as JSON, start nothing")
    add(
        "--drill",
        action="store_true",
        help="interrupt its first steps here before, in the image or in this checkout",
    )
    add(
        "--drill-data",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a channel's data for it; repeated",
    )
    add("--no-follow", action="store_true", help="start the job and leave")
    add(
        "--poll",
        type=positive,
        default=10,
        metavar="SECONDS",
        help="between two looks (default: %(default)s)",
    )
    add(
        "--check-hyperparameters",
        choices=("local", "image", "no"),
        default="local",
        help=(
            "by this checkout's parser, by that of --image with docker, or not (default: "
            "%(default)s); --drill, too"
        ),
    )
    return flag_parser


def main() -> None:
    """Check, drill if asked to, launch and follow the job of the command line."""
    args = parser().parse_intermixed_args()
    with aws.reported():
        contradictions.check_flags(args)
        image = aws.ECR.fullmatch(args.image)
        region = aws.region(args.region, otherwise=image and image["region"])
        contradictions.check_places(args, region)
        request = job_request.build(args)
        request_validation.validate(request)
        notes = hyperparameter_check.check(request, args.check_hyperparameters)
        notes += account_checks.check(request, region, dry_run=args.dry_run)
        for note in notes:
            print(f"not checked: {note}", file=sys.stderr)
        if args.drill:
            data = job_request.pairs("--drill-data", args.drill_data)
            data = {name: str(Path(folder).absolute()) for name, folder in data.items()}
            drill.run(request, args.check_hyperparameters, data)
        if args.dry_run:
            print(json.dumps(request, indent=2))
            return
        sagemaker = aws.client("sagemaker", region)
        sagemaker.create_training_job(**request)
        name = request["TrainingJobName"]
        print(f"started {name} in {region}", flush=True)
        if not args.no_follow:
            sys.exit(follower.follow(name, region, args.poll))


if __name__ == "__main__":
    main()
