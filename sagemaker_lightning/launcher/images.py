"""Says how an image comes to Amazon ECR: by a script, which only a checkout has, or by Docker."""

from sagemaker_lightning.launcher import aws
from sagemaker_lightning.launcher.hyperparameter_check import IS_CHECKOUT

HOW_TO_NAME = (
    "scripts/image_uri.sh prints yours"
    if IS_CHECKOUT
    else "`aws ecr describe-repositories` prints the addresses of yours, without their tags"
)


def how_to_push(uri: str) -> str:
    """Return what to do so that an image is at its address in Amazon ECR."""
    if IS_CHECKOUT:
        return "push it with scripts/push_image.sh"
    region = aws.image_parts(uri)["region"]
    return (
        f"log in by `aws ecr get-login-password --region {region} | docker login --username AWS "
        f"--password-stdin {uri.partition('/')[0]}`, and push it with `docker push {uri}`"
    )
