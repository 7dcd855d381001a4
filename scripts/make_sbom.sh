#!/bin/bash
# Lists the Python packages of an environment: FOLDER/packages.cdx.json (CycloneDX) and FOLDER/licenses.txt, their licences.
#
#   TOOLS=FOLDER scripts/make_sbom.sh FOLDER PYTHON     TOOLS: an environment with locks/tools.txt; PYTHON: the environment's
set -euo pipefail

folder=${1:?"usage: make_sbom.sh FOLDER PYTHON"}
python=${2:?"usage: make_sbom.sh FOLDER PYTHON"}
mkdir -p "$folder"
"${TOOLS:?}/bin/cyclonedx-py" environment --output-reproducible --output-file "$folder/packages.cdx.json" "$python"
"$TOOLS/bin/pip-licenses" --python "$python" --from=mixed --with-system --with-license-file --no-license-path \
    --format=plain-vertical --output-file "$folder/licenses.txt"
