# shellcheck shell=bash
# Lets a training that is started by a shell hear SIGTERM, has its hosts watched, and its program started again.
#
#   ENV BASH_ENV=/opt/sagemaker-lightning/sagemaker_lightning/launch/bash_env.sh
#
# Every bash that is not interactive reads the file that BASH_ENV names (bash(1)). This one changes nothing, except in two
# shells that are a container's first process. bash passes no signal on.
#
# SDK 3 replaces an image's entry point by `/bin/bash -c "... sm_train.sh"`: that shell becomes launch/shell_job.py, which
# runs the same command; in our image by the entry point, which prepares what a container lacks.
#
# AWS's PyTorch images start by `bash -m start_with_right_hostname.sh train`, whose last step is the toolkit's `train`: that
# shell becomes launch/train_command.py, which starts the toolkit with our hook.
#
# The variable says that this was done: all that the job starts inherits it. Signals are blocked until somebody, a moment
# later, handles them.
if [[ -z ${SAGEMAKER_LIGHTNING_TRAIN-} && ($$ == 1 || $PPID == 1) ]]; then
    if [[ ${BASH_EXECUTION_STRING-} == */sm_train.sh ]]; then
        set -- "${BASH_SOURCE[0]%/*}/../../entrypoint.sh"
        [[ -x $1 ]] || shift
        exec env --block-signal=TERM --block-signal=INT SAGEMAKER_LIGHTNING_TRAIN=1 \
            "$@" python3 -m sagemaker_lightning.launch.shell_job "$BASH_EXECUTION_STRING"
    fi
    mapfile -d '' -t SAGEMAKER_LIGHTNING_TRAIN </proc/$$/cmdline # $@ is not set yet
    if [[ " ${SAGEMAKER_LIGHTNING_TRAIN[*]}" == *[/\ ]start_with_right_hostname.sh\ train ]]; then
        exec env --block-signal=TERM --block-signal=INT SAGEMAKER_LIGHTNING_TRAIN=1 \
            python3 -m sagemaker_lightning.launch.train_command
    fi
    unset SAGEMAKER_LIGHTNING_TRAIN
fi
