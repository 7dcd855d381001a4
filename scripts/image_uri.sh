#!/usr/bin/env bash
# image_uri.sh - print the address of an image in your Amazon ECR registry.
#
#   scripts/image_uri.sh [REPOSITORY [TAG]]        default: sagemaker-lightning, and the version of this checkout
#
#   $ ACCOUNT=123456789012 AWS_REGION=us-east-1 scripts/image_uri.sh sagemaker-lightning 1.0
#   123456789012.dkr.ecr.us-east-1.amazonaws.com/sagemaker-lightning:1.0
#
# From the environment:
#
#   ACCOUNT               the AWS account, 12 digits     (default: the one of the credentials, from AWS STS)
#   AWS_REGION            the region                     (default: AWS_DEFAULT_REGION, or the AWS profile's)
#   PYTHON                a Python with boto3            (default: .venv's, or else python3)
set -euo pipefail

home=$(dirname "$(dirname "$(readlink -f "$0")")")
python=${PYTHON:-$home/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3

fail() {
    echo "error: $1" >&2
    exit 1
}

(($# <= 2)) || fail "image_uri.sh takes [REPOSITORY [TAG]], found $# arguments: $*"
repository=${1:-sagemaker-lightning}
tag=${2:-$(git -C "$home" describe --tags --always --dirty 2>/dev/null || true)}
region=${AWS_REGION:-$("$python" "$home/scripts/aws.py" region)}
account=${ACCOUNT:-$("$python" "$home/scripts/aws.py" account --region="$region")}

[[ $account =~ ^[0-9]{12}$ ]] || fail "ACCOUNT: found '$account', expected 12 digits"
[[ $region =~ ^[a-z]+(-[a-z]+)+-[0-9]+$ ]] || fail "AWS_REGION: found '$region', expected the name of an AWS region, e.g. us-east-1"
# The API's own rule (CreateRepository, repositoryName).
[[ ${#repository} -ge 2 && $repository =~ ^([a-z0-9]+([._-][a-z0-9]+)*/)*[a-z0-9]+([._-][a-z0-9]+)*$ ]] ||
    fail "REPOSITORY: found '$repository', expected lower-case letters, digits and single . _ - / between them"
[[ $tag =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$ ]] ||
    fail "TAG: found '$tag', expected up to 128 letters, digits, . _ -"

case $region in
cn-*) suffix=amazonaws.com.cn ;;
us-iso-*) suffix=c2s.ic.gov ;;
us-isob-*) suffix=sc2s.sgov.gov ;;
us-isof-*) suffix=csp.hci.ic.gov ;;
eu-isoe-*) suffix=cloud.adc-e.uk ;;
eusc-*) suffix=amazonaws.eu ;;
*) suffix=amazonaws.com ;; # us-gov-*, too
esac
echo "$account.dkr.ecr.$region.$suffix/$repository:$tag"
