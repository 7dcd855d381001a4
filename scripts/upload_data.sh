#!/usr/bin/env bash
# upload_data.sh - copy CIFAR-10 to S3, for the job's channel `training`.
#
#   scripts/upload_data.sh s3://BUCKET/PREFIX           fetches it first, 170 MB, into output/
#   scripts/upload_data.sh s3://BUCKET/PREFIX FILE      FILE is cifar-10-python.tar.gz
#
# From the environment:
#
#   AWS_REGION            the region of the bucket      (default: AWS_DEFAULT_REGION, or the AWS profile's)
#   PYTHON                a Python with boto3           (default: .venv's, or else python3)
set -euo pipefail

# Address and checksum are those of torchvision's datasets.CIFAR10.
url=https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz
md5=c58f30108f718f92721af3b95e74349a
name=cifar-10-python.tar.gz

home=$(dirname "$(dirname "$(readlink -f "$0")")")
python=${PYTHON:-$home/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3

fail() {
    echo "error: $1" >&2
    exit 1
}

is_whole() {
    echo "$md5  $1" | md5sum --check --status 2>/dev/null
}

(($# == 1 || $# == 2)) || fail "upload_data.sh takes s3://BUCKET/PREFIX [FILE], found $# arguments: $*"
[[ $1 =~ ^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?$ ]] ||
    fail "found '$1', expected s3://BUCKET/PREFIX, BUCKET of 3 to 63 lower-case letters, digits, dots and dashes"
destination=${1%/}/
file=${2:-$home/output/$name}
[ $# -eq 1 ] || [ -f "$file" ] || fail "$file: there is no such file"

if [ $# -eq 1 ] && ! is_whole "$file"; then
    echo "fetching $url" >&2
    mkdir -p "$home/output"
    curl --fail --location --silent --show-error --retry 3 --output "$file.part" "$url" ||
        fail "$url could not be fetched; fetch it elsewhere, and give the file: upload_data.sh $1 FILE"
    mv "$file.part" "$file"
fi
is_whole "$file" || fail "$file: found MD5 $(md5sum <"$file" | cut -c-32), expected $md5, CIFAR-10's; fetch it again"

"$python" "$home/scripts/aws.py" upload "$file" "$destination$name"
echo "--channel=training=$destination"
