#!/bin/bash
# The image's entry point: activates the environment, prepares what a bare container lacks, and becomes the command.
#
#   docker run IMAGE train                     trains, with whatever of /opt/ml is mounted; with nothing mounted, too
#   docker run IMAGE python app/train.py ...   any other command, in the environment
#   docker run IMAGE --help                    says what there is
#
# `make train` runs it without Docker, on the folder SAGEMAKER_BASE_DIR in place of /opt/ml.
set -euo pipefail

# A file that is opened takes the place of a stream that is closed; bash has opened this script.
is_open() { [[ -e /dev/fd/$1 && ! /dev/fd/$1 -ef $0 ]]; }
is_open 0 || exec </dev/null
is_open 2 || { is_open 1 && exec 2>&1; } || exec 2>/dev/null
is_open 1 || exec >&2

# The folder of the package sagemaker_lightning. In the image, this file lies beside it; else, in it.
home=$(dirname "$(readlink -f "$0")")
home=${home%/sagemaker_lightning/launch}
conda=/opt/conda/envs/sagemaker-lightning
base=${SAGEMAKER_BASE_DIR:-/opt/ml}

status=1
fail() { # TEXT...
    local line="error: ${*//[[:cntrl:]]/ }"
    echo "$line" >&2
    { make_way "$base/output/failure" && echo "$line" >"$base/output/failure"; } 2>/dev/null || true
    exit "$status"
}

help() {
    cat <<EOF
usage: docker run [OPTION OF docker run]... IMAGE [COMMAND]

commands:
  train                             trains, as SageMaker does it; without a command, too
  python app/train.py --help        prints all flags, which are also a job's hyperparameters
  python app/train.py --FLAG=VALUE  trains with these flags, without SageMaker's toolkit
  python -m sagemaker_lightning.doctor
                                    prints what this container has for training, and what is wrong
  python -m sagemaker_lightning.drill --help
                                    says how to try whether an interrupted training ends as one left alone
  bash                              a shell in the environment, with docker run -it

what train uses, where it is mounted (--volume FOLDER:/opt/ml/...):
  /opt/ml/input/data/training                the data
  /opt/ml/input/config/hyperparameters.json  flags without their dashes: {"trainer.max_epochs": 2}
  /opt/ml/code                               source: modules, requirements.txt, a program
  /opt/ml/checkpoints                        checkpoints: an interrupted training continues from them
  /opt/ml/model                              gets the trained model
  /opt/ml/output                             gets logs, and in the file failure the reason if it fails

which program train runs (--env):
  SAGEMAKER_PROGRAM                 here: ${SAGEMAKER_PROGRAM-}
EOF
}

# Frees a file's name. An earlier run may have left anything there: a pipe would hang, a link would lead elsewhere. A folder
# gets another name.
make_way() {
    { rm -f "$1" || mv -T "$1" "$(mktemp -d "$1.XXXXXX")"; } 2>/dev/null
}

# What `conda activate` does, without starting conda (half a second) and without a login shell.
activate() {
    [[ -d $conda ]] || return 0
    export CONDA_PREFIX=$conda CONDA_DEFAULT_ENV=${conda##*/} PATH="$conda/bin:$PATH"
    local script
    set +u # the packages' scripts are not written for strict shells
    for script in "$conda"/etc/conda/activate.d/*.sh; do
        # shellcheck disable=SC1090
        [[ -r $script ]] && . "$script"
    done
    set -u
}

# Where the host's GPU driver is older than torch needs, NVIDIA's own libraries may help: doctor/gpu_driver.py decides.
help_an_older_driver() {
    [[ -r ${SAGEMAKER_LIGHTNING_ROOT-}/proc/driver/nvidia/version ]] || return 0
    local folder
    folder=$(python -I "$home/sagemaker_lightning/doctor/gpu_driver.py" "${CONDA_PREFIX:-/nowhere}/cuda-compat") || return 0
    [[ -z $folder ]] || export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

# glibc gives the memory of every large tensor back to the system and asks for it again in the next step: on a CPU, page
# faults were a third of the training time. Now it keeps up to 1 GiB. What the user has set stays.
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1073741824} MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}

# A crash in native code says where it was.
export PYTHONFAULTHANDLER=${PYTHONFAULTHANDLER-1}

# The toolkit exits 0 in silence, having done nothing, where a file below is missing or output/ cannot be written.
prepare() {
    [[ -n $temporary ]] || fail "/tmp: nothing can be written there, nor in \$TMPDIR, /var/tmp or /dev/shm; mount a folder there (--tmpfs /tmp)"
    local folder unwritable=
    for folder in "$base"/{output,output/data,model,input/config,input/data,code}; do
        mkdir -p "$folder" 2>/dev/null || true
        is_usable "$folder" || unwritable+="${unwritable:+, }$folder"
    done
    [[ -z $unwritable ]] || fail "$unwritable: no folder that user $(id -u) can write; mount one at each" \
        "(docker run --volume FOLDER:${unwritable%%,*} ...)"
    local file
    for file in "$base"/output/{success,failure,.probe}; do # an earlier run's, where the folder is used again
        make_way "$file" || true
    done
    { head -c 1048576 /dev/zero >"$base/output/.probe"; } 2>/dev/null ||
        fail "$base/output: cannot be written or is full; expected a writable folder with space left"
    rm -f "$base/output/.probe"

    local interface=lo
    [[ -e /sys/class/net/eth0 ]] && interface=eth0
    provide hyperparameters.json '{}'
    provide resourceconfig.json \
        "{\"current_host\": \"localhost\", \"hosts\": [\"localhost\"], \"network_interface_name\": \"$interface\"}"
    local channels=""
    [[ -e $base/input/config/inputdataconfig.json ]] || channels=$(channels) || exit 1
    provide inputdataconfig.json "$channels"
    local wrong
    wrong=$(python -I "$home/sagemaker_lightning/contract/job_config.py" "$base/input/config") ||
        fail "${wrong:-$base/input/config: cannot be checked; is $home/sagemaker_lightning whole, and can python run?}"
}

# Whether a folder of /opt/ml is there, and can be written where anything has to be.
is_usable() {
    case $1 in
    */output/data) ! is_usable "$base/output" || [[ -d $1 && -w $1 ]] ;; # else the folder above is named
    */input/config) [[ -w $1 || -e $1/hyperparameters.json && -e $1/resourceconfig.json && -e $1/inputdataconfig.json ]] ;;
    */input/data | */code) [[ -d $1 ]] ;;
    *) [[ -d $1 && -w $1 ]] ;;
    esac
}

provide() {
    [[ -e $base/input/config/$1 ]] || { echo "$2" >"$base/input/config/$1"; } 2>/dev/null ||
        fail "$base/input/config/$1: is missing and cannot be written; mount the folder writable, or with that file in it"
}

# Each folder that is mounted under input/data is a channel.
channels() {
    local folder list=""
    for folder in "$base"/input/data/*; do
        [[ -e $folder || -L $folder ]] || continue
        [[ -d $folder ]] || fail "$folder: is not a folder; expected the folder of a channel: mount one there, or mount a file" \
            "within it ($folder/NAME)"
        [[ $(basename "$folder") =~ ^[A-Za-z0-9._-]{1,64}$ ]] ||
            fail "$folder: is not a name of a channel; expected up to 64 letters, digits and ._-"
        list+="${list:+, }\"$(basename "$folder")\": {\"TrainingInputMode\": \"File\"}"
    done
    echo "{$list}"
}

# A user without a name or a home, and a container that is read-only, as with `docker run --user=1000 --read-only`: packages
# ask for a name, a home and a folder for temporary files.
settle() {
    local folder
    for folder in "${TMPDIR-}" /tmp /var/tmp /dev/shm; do
        [[ -d $folder && -w $folder ]] || continue
        temporary=$folder
        [[ $folder == "${TMPDIR-/tmp}" ]] || export TMPDIR=$folder
        break
    done
    id -un >/dev/null 2>&1 || export USER=${USER:-$(id -u)}
    [[ -w ${HOME:-/nowhere} ]] || { [[ -n $temporary ]] && HOME=$(mktemp -d "$temporary/home.XXXXXX") && export HOME; } || true
}

# The shell's own words would be about exec. The exit statuses are the shell's.
check_command() {
    [[ -z $(type -P -- "$1") ]] || return 0
    local status=127 name=${1:0:200} advice="--help says what there is"
    name=${name@Q}
    [[ ! -e $1 ]] || status=126
    case $1 in
    --?*) fail "$name: found a flag in the place of a command; give python app/train.py ${name:1:-1}; $advice" ;;
    serve) fail "$name: this image trains, and serves no model; give train; $advice" ;;
    *.py) [[ ! -f $1 ]] || fail "$name: cannot be run by itself; give python $name; $advice" ;;
    esac
    fail "$name: no command that can be run here; $advice"
}

# On a busy machine the toolkit's imports alone take long: a line says so. (In nanoseconds: how long this process ran, and
# how long it waited for a CPU.)
busy() {
    local ran=0 waited=0
    read -r ran waited _ 2>/dev/null </proc/$$/schedstat || return 0
    ((waited <= 2 * ran)) || echo "starting: importing the training toolkit; this machine is busy" >&2
}

# A container's first process does not hear a signal that it has no handler for. This shell has one; what it becomes gets
# signals blocked, and they wait until launch/toolkit_hook.py, seconds later, has its own.
trap 'exit 143' TERM
trap 'exit 130' INT
temporary=
settle
activate
help_an_older_driver
# A job that gives an entry point of its own replaces CMD, too; `exec` without a command does nothing, and ends with 0.
(($#)) || set -- train
case $1 in --help | -h | help) help && exit ;; esac
if [[ ${1-} == train ]]; then
    (($# == 1)) || fail "train takes no flags (found: ${*:2}); hyperparameters are in $base/input/config/hyperparameters.json;" \
        "--help without train says what else there is"
    prepare
    busy
    # The variable tells what the job starts from what comes in from outside (process/supervisor.py).
    [[ ${SAGEMAKER_TRAINING_MODULE-} != sagemaker_lightning.launch.toolkit_hook:main ]] ||
        exec env --block-signal=TERM --block-signal=INT SAGEMAKER_LIGHTNING_TRAIN=1 python -m sagemaker_lightning.launch.train_command
fi
check_command "$1"
exec "$@"
