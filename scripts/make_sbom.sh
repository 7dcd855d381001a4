#!/bin/bash
# Lists the Python packages of an environment: FOLDER/packages.cdx.json (CycloneDX) and FOLDER/licenses.txt, their licences.
#
#   TOOLS=FOLDER scripts/make_sbom.sh FOLDER PYTHON     TOOLS: an environment with locks/tools.txt; PYTHON: the environment's
set -euo pipefail

folder=${1:?"usage: make_sbom.sh FOLDER PYTHON"}
python=${2:?"usage: make_sbom.sh FOLDER PYTHON"}
mkdir -p "$folder"
"${TOOLS:?}/bin/cyclonedx-py" environment --output-reproducible --output-file "$folder/packages.cdx.json" "$python"
# "Reproducible" leaves the serial number out, and without one a forge attests no list. Here it follows from the list.
"$TOOLS/bin/python" - "$folder/packages.cdx.json" <<'END'
import json, sys, uuid
from pathlib import Path

path = Path(sys.argv[1])
listed = path.read_text()
number = uuid.uuid5(uuid.NAMESPACE_OID, listed)
path.write_text(json.dumps({"serialNumber": f"urn:uuid:{number}"} | json.loads(listed), indent=2))
END
"$TOOLS/bin/pip-licenses" --python "$python" --from=mixed --with-system --with-license-file --no-license-path \
    --format=plain-vertical --output-file "$folder/licenses.txt"
