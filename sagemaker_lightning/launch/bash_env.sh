# shellcheck shell=bash
# Lets a training that is started by a shell script hear SIGTERM: SageMaker's SDK 3 goes round the image's entry point.
#
#   ENV BASH_ENV=/opt/sagemaker-lightning/sagemaker_lightning/launch/bash_env.sh
#
# Every bash that is not interactive reads the file that BASH_ENV names (bash(1)). This one changes nothing, except in the
# shell that SDK 3 makes a job's first process: `/bin/bash -c "... sm_train.sh"`. bash passes no signal on, so that shell
# becomes launch/shell_job.py, which runs the same command; in our image by the entry point, which prepares what a
# container lacks. The variable says that this was done: all that the job starts inherits it. Signals are blocked until
# shell_job.py, a moment later, handles them.
if [[ -z ${SAGEMAKER_LIGHTNING_TRAIN-} && ${BASH_EXECUTION_STRING-} == *sm_train.sh* && ($$ == 1 || $PPID == 1) ]]; then
    set -- "${BASH_SOURCE[0]%/*}/../../entrypoint.sh"
    [[ -x $1 ]] || shift
    exec env --block-signal=TERM --block-signal=INT SAGEMAKER_LIGHTNING_TRAIN=1 \
        "$@" python3 -m sagemaker_lightning.launch.shell_job "$BASH_EXECUTION_STRING"
fi
