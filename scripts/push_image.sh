#!/usr/bin/env bash
# push_image.sh - push the image to a registry, tagged with its version and its revision. `make push` runs it.
#
#   scripts/push_image.sh REPOSITORY[:TAG]          a repository of your Amazon ECR registry, made if it is missing
#   scripts/push_image.sh HOST/REPOSITORY[:TAG]     any registry, after `docker login HOST`; Amazon ECR as above
#
# TAG is one more tag; outside of Amazon ECR, it is `latest` if there is none. Docker Hub needs its host, too.
# The last line on stdout is the address by digest: what it names never changes.
#
# From the environment:
#
#   IMAGE                 the image                                          (default: sagemaker-lightning)
#   DOCKER                the docker client                                  (default: docker)
#   ACCOUNT, AWS_REGION, PYTHON      for Amazon ECR: see image_uri.sh
set -euo pipefail

home=$(dirname "$(dirname "$(readlink -f "$0")")")
docker=${DOCKER:-docker}
image=${IMAGE:-sagemaker-lightning}
python=${PYTHON:-$home/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3

fail() {
    echo "error: $1" >&2
    exit 1
}

label() {
    "$docker" image inspect --format "{{index .Config.Labels \"org.opencontainers.image.$1\"}}" "$image"
}

(($# == 1)) || fail "push_image.sh takes REPOSITORY (in Amazon ECR) or HOST/REPOSITORY[:TAG], found $# arguments: $*"
"$docker" version >/dev/null 2>&1 || fail "no Docker engine answers; '$docker version' says why"
"$docker" image inspect "$image" >/dev/null 2>&1 || fail "IMAGE: there is no image '$image' here; make build makes it"

# Docker's own rule for what is a host: it has a dot or a port, or is localhost.
repository=$1
tag=
if [[ $repository =~ ^(.*):([^/:]+)$ ]]; then
    repository=${BASH_REMATCH[1]}
    tag=${BASH_REMATCH[2]}
fi
host=${repository%%/*}
if [[ $repository != */* || ($host != *.* && $host != *:* && $host != localhost) ]]; then
    address=$("$home/scripts/image_uri.sh" "$repository" any)
    repository=${address%:any}
    host=${repository%%/*}
fi
[[ ${repository#*/} =~ ^[a-z0-9._/-]+$ ]] || fail "REPOSITORY: found '$1', expected [HOST/]NAME[:TAG], NAME in lower case"

if [[ $host =~ ^[0-9]{12}\.dkr[.-]ecr(-fips)?\.([a-z0-9-]+)\. ]]; then
    region=${BASH_REMATCH[2]}
    "$python" "$home/scripts/aws.py" create-repository "${repository#*/}" --region="$region"
    "$python" "$home/scripts/aws.py" ecr-password --region="$region" |
        "$docker" login --username AWS --password-stdin "$host" >/dev/null
    tags=(${tag:+"$tag"}) # no `latest`: tags of a repository may be immutable, and a job should name what it ran
else
    tags=("${tag:-latest}")
fi

version=$(label version)
revision=$(label revision)
[[ $version =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$ && $version != unknown ]] && tags+=("$version")
[[ $revision =~ ^[0-9a-f]{40}$ ]] && tags+=("${revision:0:12}")
((${#tags[@]})) || fail "IMAGE: '$image' has no version and no revision to tag it with; make build in a git checkout gives it both"

for tag in "${tags[@]}"; do
    "$docker" tag "$image" "$repository:$tag"
    "$docker" push --quiet "$repository:$tag" >&2
done
"$docker" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$image" | grep --fixed-strings "$repository@" | head -1
