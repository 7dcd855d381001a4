"""Finds flags of launch.py that contradict each other, or the region.

Sources: the API reference of CreateTrainingJob, ResourceConfig (keys of volumes) and
InstancePreference; the developer guide for keep-alive, "SageMaker AI managed warm pools", and for
file systems, "Setting up training jobs to access datasets"; for images outside of Amazon ECR, the
reference of TrainingImageConfig.
"""

import argparse

from sagemaker_lightning.launcher import aws, images, job_request

# Families with volumes of their own, which the reference of ResourceConfig names: their hardware
# encrypts them, and SageMaker refuses a key.
LOCAL_STORAGE = ("ml.p4d.", "ml.g4dn.", "ml.g5.")
SOURCE = "sagemaker_submit_directory"
SOURCE_ON_S3 = f"{SOURCE}=s3://"


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that exclude or need each other."""
    max_wait = args.max_wait
    for is_wrong, line in (
        (
            args.spot and not (args.checkpoints or args.yes),
            "--spot: needs --checkpoints=s3://BUCKET/PREFIX, or an interruption loses all; --yes "
            "starts the job all the same",
        ),
        (
            max_wait and not args.spot,
            f"--max-wait: found {max_wait}, but only a --spot job waits; give both or neither",
        ),
        (
            max_wait and max_wait < args.max_run,
            f"--max-wait: found {max_wait}, expected --max-run ({args.max_run}) or more: waiting "
            "and running count",
        ),
        (
            args.drill_data and not args.drill,
            "--drill-data: found without --drill; give both or neither",
        ),
        (
            args.keep_alive and args.spot,
            "--keep-alive: not allowed with --spot; leave one of them out",
        ),
        (
            args.keep_alive and args.instance_group,
            "--keep-alive: not allowed with --instance-group; leave one out",
        ),
        (
            args.instance_group and (args.instance_type or args.instance_count),
            "--instance-group: not allowed with --instance-type or --instance-count; the groups "
            "say both",
        ),
        (
            args.instance_preference and (args.instance_type or args.instance_group or args.spot),
            "--instance-preference: not allowed with --instance-type, --instance-group or --spot; "
            "leave one of them out",
        ),
        (
            args.training_plan and any(",plan=" in text for text in args.instance_preference),
            "--training-plan: not allowed with a plan in --instance-preference; leave one of them "
            "out",
        ),
        (
            bool(args.subnet) != bool(args.security_group),
            f"{'--security-group' if args.subnet else '--subnet'}: found none, but a VPC needs at "
            "least one --subnet and one --security-group",
        ),
        (
            not args.subnet
            and any(job_request.is_file_system(text.partition("=")[2]) for text in args.channel),
            "--channel: found a file system, which a job reaches through its VPC alone; give "
            "--subnet and --security-group",
        ),
        (
            args.network_isolation
            and any(text.startswith(SOURCE_ON_S3) for text in args.hyperparameters),
            "--network-isolation: the job fetches no source from S3 then; give the source as a "
            "channel, --channel=code=s3://..., and "
            f"{SOURCE}=/opt/ml/input/data/code/sourcedir.tar.gz",
        ),
        (
            not aws.ECR.fullmatch(args.image) and not args.subnet,
            f"--image: found {args.image!r}, expected an address in Amazon ECR, "
            "ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG with NAME in lower case "
            f"({images.HOW_TO_NAME}), or one in a registry that --subnet and "
            "--security-group lead to",
        ),
    ):
        if is_wrong:
            raise ValueError(line)
    _check_volume_key(args)


def _check_volume_key(args: argparse.Namespace) -> None:
    """Raise ValueError for a key of volumes that is an alias, or that the instances cannot have."""
    key = args.volume_kms_key
    if not key:
        return
    if key.startswith("alias/") or ":alias/" in key:
        raise ValueError(
            f"--volume-kms-key: found the alias {key!r}, expected the ID or ARN of a key"
        )
    resources = job_request.resources(args)
    candidates = resources.get("InstanceGroups") or resources.get("InstancePreferences")
    for each in candidates or [resources]:
        if each["InstanceType"].startswith(LOCAL_STORAGE):
            raise ValueError(
                f"--volume-kms-key: not allowed with {each['InstanceType']}, whose own volumes "
                "are encrypted by its hardware; leave it out, or give another --instance-type"
            )


def check_places(args: argparse.Namespace, region: str) -> None:
    """Raise ValueError if image, role, keys or plan belong to another region or partition."""
    image = aws.ECR.fullmatch(args.image)
    if image and image["region"] != region:
        raise ValueError(
            f"--image: found an image in {image['region']}, but the job is to run in {region}; "
            f"push it there, or give --region={image['region']}"
        )
    partition = aws.session().get_partition_for_region(region)
    role = args.role.split(":")
    if role[0] == "arn" and len(role) > 2 and role[1] != partition:
        raise ValueError(
            f"--role: found a role in {role[1]}, but region {region} is in {partition}"
        )
    plans = [text.partition(",plan=")[2] for text in args.instance_preference]
    for flag, arn in (
        ("--output-kms-key", args.output_kms_key),
        ("--volume-kms-key", args.volume_kms_key),
        ("--training-plan", args.training_plan),
        *(("--instance-preference", plan) for plan in plans),
    ):
        words = (arn or "").split(":")
        if words[0] == "arn" and len(words) > 3 and words[3] != region:
            raise ValueError(
                f"{flag}: found {arn}, which is in {words[3]}, but the job is to run in {region}"
            )
