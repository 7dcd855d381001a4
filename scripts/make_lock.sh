#!/bin/bash
# Writes locks/: every package of every environment, direct or not, by version and SHA-256. `make lock` runs it.
#
#   scripts/make_lock.sh [OPTION OF uv pip compile]...     e.g. --upgrade, --upgrade-package=NAME
#   TORCH=cpu scripts/make_lock.sh                         locks/image-cpu.txt alone: the image with another build of torch
#
# What is locked stays as it is, unless a list has another version now, or an option asks for newer ones. TORCH is cpu, cu126
# or another name in PyTorch's index (TORCH_INDEX_URL), which must be reachable.
set -euo pipefail

cd "$(dirname "$0")/.."
options=("$@")

# All that a lock may serve: Linux, and any Python from 3.11 on. No index is named: a lock serves a mirror as well.
lock() {  # NAME LIST-OR-OPTION...
    scripts/uv.sh pip compile --universal --python-version 3.11 --generate-hashes \
        --custom-compile-command "make lock${TORCH:+ TORCH=$TORCH}" --constraints locks/never.txt \
        --output-file "locks/$1.txt" "${options[@]}" "${@:2}"
}

pins=$(sed -n '/- pip:/,$ s/^ *- \([^ ]*==[^ ]*\).*/\1/p' environment.yml)
if [[ -n ${TORCH-} ]]; then
    # The same versions of all else.
    lock "image-$TORCH" --constraints locks/image.txt - <<<"$(sed -E "s/^(torch|torchvision)==[^ ]*/&+$TORCH/" <<<"$pins")" || {
        echo "error: TORCH: found '$TORCH', of which nothing is locked (see above); has PyTorch's index these versions of torch" \
            "and torchvision for it? TORCH_INDEX_URL names another index" >&2
        exit 1
    }
    exit
fi
lock image - <<<"$pins"
lock tests --constraints locks/image.txt tests/requirements.txt - <<<"$pins"
# The toolkit has no wheel: it is built before the others are installed, with the setuptools that is locked.
lock toolkit --no-deps - <<<"$(grep '^sagemaker-training==' <<<"$pins")"
lock build --no-deps --constraints locks/image.txt - <<<setuptools
lock bolts --no-deps - <<<"$(grep -o 'lightning-bolts==[^ ]*' environment.yml)"
# They are added to the image's packages, and change none of them.
lock mlflow --constraints locks/image.txt - <<<"$(grep -oE '(mlflow-skinny|sagemaker-mlflow)==[^ ]*' environment.yml)"
lock wandb --constraints locks/image.txt - <<<"$(grep -o 'wandb==[^ ]*' environment.yml)"
lock uv - <<<"$(grep -o '^uv==[^ ]*' scripts/tools.txt)"
lock tools scripts/tools.txt
for list in tests/environments/*.txt; do
    lock "$(basename "$list" .txt)" "$list"
done
