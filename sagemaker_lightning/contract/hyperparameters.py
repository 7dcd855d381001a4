"""Turns hyperparameters into flags that mean what their sender meant.

SageMaker passes on one flat JSON object whose values are strings (CreateTrainingJob,
HyperParameters). Every client makes strings of values in its own way: JSON (SDK 2 with source_dir,
SDK 3), bare text, or Python's str() (SDK 2's Estimator: True, None, ['a', 1]). The toolkit's own
command line loses some of it: 1.10 becomes 1.1, null becomes nothing, {"a": 1} becomes a=1.
"""

import ast
import json
from collections.abc import Mapping

MAX_RESTARTS = ("max_restarts", "max-restarts")
"""For whoever starts the program, and starts it again (launch/restarts.py)."""


def flags(hyperparameters: Mapping[str, object]) -> list[str]:
    """Return `--name=value` for each of the job's own hyperparameters.

    They are sorted by name; those of SageMaker are left out.
    """
    names = sorted(name for name in hyperparameters if is_own(name))
    return [f"--{name}={text(hyperparameters[name])}" for name in names]


def is_own(name: str) -> bool:
    """Return whether a hyperparameter is for the program.

    The others are for the toolkit or for what starts the program, or come from the tuner.
    """
    others = (*MAX_RESTARTS, "_tuning_objective_metric")
    return not name.startswith("sagemaker_") and name not in others


def text(value: object) -> str:
    """Return a value as the text of a flag.

    A string stays as it is, but loses the quotes of JSON. Python's spelling of a boolean, None, a
    list or a dict becomes JSON. Any other value becomes JSON.
    """
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        decoded = json.loads(value)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return _python_to_json(value)
    return decoded if isinstance(decoded, str) else value  # a number stays as it was written


def _python_to_json(value: str) -> str:
    """Return JSON for a value that Python's str() has written.

    It converts booleans, None, lists, tuples and dicts, and returns any other text as it is.
    """
    if value not in ("True", "False", "None") and value[:1] not in ("[", "{", "("):
        return value
    try:
        return json.dumps(ast.literal_eval(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value
