"""MLflow's own server, on loopback, in one process: the command `mlflow server` starts four.

    python mlflow_server.py FOLDER

It prints its port.
"""

import os
import sys

folder = sys.argv[1]
os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{folder}/mlflow.sqlite"
os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = f"{folder}/artifacts"

from mlflow.server import app  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

server = make_server("127.0.0.1", 0, app)
print(server.port, flush=True)
server.serve_forever()
