"""Finds flags of launch.py that contradict each other, or the region.

Sources: the API reference of CreateTrainingJob; for keep-alive, the developer guide, "SageMaker AI
managed warm pools"; for images outside of Amazon ECR, the reference of TrainingImageConfig.
"""

import argparse

from sagemaker_lightning.launcher import aws, images


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
            args.capacity_wait and args.no_follow,
            "--capacity-wait: not allowed with --no-follow, as nobody would start the job again; "
            "leave one of them out",
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
            bool(args.subnet) != bool(args.security_group),
            f"{'--security-group' if args.subnet else '--subnet'}: found none, but a VPC needs at "
            "least one --subnet and one --security-group",
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


def check_places(args: argparse.Namespace, region: str) -> None:
    """Raise ValueError if image or role belong to another region or partition."""
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
