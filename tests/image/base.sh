#!/usr/bin/env bash
# A stand-in for the base image, for tests and CI on machines that reach no container registry and no conda host. Never
# push an image that is built on it.
#
#   tests/image/base.sh TAG                              make it, unless it is there and current
#   eval "$(tests/image/base.sh --print-args TAG)"       the variables that scripts/build_image.sh needs to build on it
#
# Needs root, debootstrap and a Docker engine (Debian's packages debootstrap and docker.io). The image is the host's own
# Debian release from the host's own mirror, with python3 and miniconda_stand_in.sh. Nothing else of this machine is in
# it: extra CA certificates go in by the build argument EXTRA_CA_CERTIFICATE, as on any closed network.
#
# Environment: DOCKER  the docker client (default: docker)
set -euo pipefail

docker=${DOCKER:-docker}
installer=$(dirname "$0")/miniconda_stand_in.sh
installer_in_image=/opt/miniconda_stand_in.sh
installer_sum=$(sha256sum <"$installer" | cut -d' ' -f1)

print_args() {  # TAG -> `export` lines
    local certificates=(/usr/local/share/ca-certificates/*.crt) index
    printf 'export BASE_IMAGE=%q MINICONDA_URL=%q MINICONDA_SHA256=%q\n' \
        "$1" "file://$installer_in_image" "$installer_sum"
    [ ! -e "${certificates[0]}" ] || printf 'export EXTRA_CA_CERTIFICATE=%q\n' "$(cat "${certificates[@]}")"
    index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
    [ -z "$index" ] || printf 'export PIP_INDEX_URL=%q\n' "$index"
}

make_root() {  # DIRECTORY: fill it with a minimal Debian
    local root=$1 suite mirror source attempt
    suite=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    # shellcheck disable=SC2016  # apt's own placeholder
    mirror=$(apt-get indextargets --no-release-info --format '$(REPO_URI)' "Created-By: Packages" "Release: $suite" |
        sed -n 1p)
    # A mirror that fails once for one package fails debootstrap: the packages that came are kept for the next attempt.
    mkdir "$scratch/packages"
    for attempt in 1 2 3; do
        rm -rf --one-file-system "$root"
        # python3, its venv and its headers: what the stand-in's conda is made of
        if debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,libpython3-dev \
            --cache-dir="$scratch/packages" "$suite" "$root" ${mirror:+"$mirror"}; then
            break
        fi
        [ "$attempt" -lt 3 ] || return 1
        sleep $((attempt * 5))
    done
    for source in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
        [ ! -s "$source" ] || install -D -m 644 "$source" "$root$source"
    done
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    find "$root/usr/lib" -name 'libpython*.a' -delete
    # As in Ubuntu's image: of the documentation, licences alone.
    rm -rf "$root"/usr/share/{man,locale}
    find "$root/usr/share/doc" ! -type d ! -name copyright -delete
    install -m 644 "$installer" "$root$installer_in_image"
}

clean_up() {
    [ $? -eq 0 ] || cat "$scratch/log" >&2
    rm -rf --one-file-system "$scratch"
}

make_image() {  # TAG
    local label=sagemaker-lightning.stand-in made_by
    made_by=$(cat "$0" "$installer" | sha256sum | cut -d' ' -f1)
    if [ "$("$docker" image inspect --format "{{index .Config.Labels \"$label\"}}" "$1" 2>&1)" = "$made_by" ]; then
        return
    fi
    scratch=$(mktemp -d)
    trap clean_up EXIT
    make_root "$scratch/root" >"$scratch/log" 2>&1  # no `|| ...` here: it would switch off `set -e` in the function
    tar -C "$scratch/root" --numeric-owner -c . | "$docker" import \
        --change "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
        --change 'CMD ["/bin/bash"]' --change "LABEL $label=$made_by" - "$1"
}

case "$#:${1:-}" in
    2:--print-args) print_args "$2" ;;
    1:[!-]*) make_image "$1" ;;
    *) echo "usage: $0 [--print-args] TAG" >&2; exit 2 ;;
esac
