"""Checks the files of input/config, and says in one line which one is wrong.

    python sagemaker_lightning/contract/job_config.py FOLDER

prints what is wrong with which file, and ends with status 1 if anything is. It runs before the
toolkit reads these files, because the toolkit would answer with a traceback.

It needs only the standard library: entrypoint.sh runs it as a program of its own.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a program, this package is not on Python's path
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from sagemaker_lightning.contract.errors import UserError

MAX_FILE_BYTES = 2**24  # the largest file that we read
# The most characters in all of these files. Linux accepts 131,072 bytes in one environment
# variable, and the toolkit puts these files into one (SM_TRAINING_ENV).
MAX_CHARACTERS = 100_000
CHANNEL_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises UserError, which names the file and what is wrong with it.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        content = json.loads(path.read_bytes().decode())
        if type(content) is dict:
            _check_texts(content)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); expected a JSON object"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected a JSON object") from None
    if type(content) is not dict:
        raise UserError(f"{path}: found {json.dumps(content)[:50]}; expected a JSON object")
    return content


def checkpoint_path(path: Path) -> str:
    """Return the folder that a checkpointconfig.json names.

    Raises UserError if it names none or cannot be read.
    """
    content = read(path)
    if wrong := _check_checkpoints(content):
        raise UserError(f"{path}: {wrong}")
    return str(content["LocalPath"])


def _check_texts(content: Any) -> None:
    """Raise ValueError for a text that no environment variable can have.

    It checks all names and values in `content`.
    """
    for text in _texts(content):
        if "\0" in text:
            raise ValueError(f"it has a NUL in {text[:50]!r}")
        # Half of a surrogate pair raises UnicodeEncodeError, which is a ValueError.
        text.encode()


def _texts(content: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, the names in its objects included."""
    if type(content) is str:
        yield content
    elif type(content) is list:
        for inner in content:
            yield from _texts(inner)
    elif type(content) is dict:
        yield from content
        for inner in content.values():
            yield from _texts(inner)


def check(folder: Path) -> None:
    """Check all files of input/config in `folder`.

    Raises UserError, which names the file, if one is not as SageMaker writes it.
    """
    checks = {
        "hyperparameters.json": _check_hyperparameters,
        "resourceconfig.json": _check_resources,
        "inputdataconfig.json": _check_channels,
        "checkpointconfig.json": _check_checkpoints,
    }
    characters = {}
    for name, check_content in checks.items():
        path = folder / name
        if name == "checkpointconfig.json" and not path.exists():
            continue
        content = read(path)
        if wrong := check_content(content):
            raise UserError(f"{path}: {wrong}")
        characters[path] = len(json.dumps(content))
    if sum(characters.values()) > MAX_CHARACTERS:
        longest = max(characters, key=lambda path: characters[path])
        raise UserError(
            f"{longest}: found {characters[longest]} characters; all files there may have "
            f"{MAX_CHARACTERS}, as they become environment variables; give what is longer as a "
            "file in a channel"
        )


# Each function below returns what is wrong with the content of one file; "" if nothing is.


def _check_hyperparameters(content: dict[str, Any]) -> str:
    for name, value in content.items():
        if not name or "=" in name:
            return f"found the name {name!r}; expected names without ="
        try:
            decoded = json.loads(value) if type(value) is str else value
        except RecursionError:
            return f"{name} is a list or object that is nested too deeply; expected some levels"
        except ValueError:
            decoded = value
        try:
            _check_texts(decoded if type(decoded) is str else "")
        except ValueError as error:
            return f"{name} cannot be an argument: {error}"
        # The toolkit uses the values of the SDKs without a check, as variables and paths.
        if name in TEXT_HYPERPARAMETERS and decoded is not None and type(decoded) is not str:
            return f"found {name}={json.dumps(decoded)[:50]}; expected a text"
        if name == LOG_LEVEL and type(decoded) is not int and decoded not in LOG_LEVELS:
            return (
                f"found {name}={json.dumps(decoded)[:50]}; expected {', '.join(LOG_LEVELS)} and "
                "their numbers"
            )
    return ""


# Hyperparameters of the SDKs that have to be texts.
TEXT_HYPERPARAMETERS = {
    "sagemaker_program",
    "sagemaker_submit_directory",
    "sagemaker_region",
    "sagemaker_job_name",
}
TEXT_HYPERPARAMETERS |= {"sagemaker_s3_output"}
LOG_LEVEL = "sagemaker_container_log_level"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _check_resources(content: dict[str, Any]) -> str:
    hosts = content.get("hosts", [])
    groups = content.get("instance_groups", [])
    if type(hosts) is not list or not all(type(host) is str and host for host in hosts):
        return f"found hosts {json.dumps(hosts)[:50]}; expected a list of names"
    if content.get("current_host") not in hosts:
        host = json.dumps(content.get("current_host"))[:50]
        return (
            f"found current_host {host}, which is not among hosts {json.dumps(hosts)[:100]}; "
            "expected a name of that list"
        )
    if len({*hosts}) < len(hosts):
        return f"found hosts {json.dumps(hosts)[:50]}; expected each name once"
    for name in ("network_interface_name", "current_group_name", "current_instance_type"):
        if type(content.get(name, "")) is not str:
            return f"found {name} {json.dumps(content[name])[:50]}; expected a name"
    if type(groups) is not list or not all(map(_is_group, groups)):
        return (
            "its instance_groups are wrong; expected a list of {instance_group_name, "
            "instance_type, hosts}"
        )
    return ""


def _is_group(group: Any) -> bool:
    """Return whether this is an instance group with a name, a type and hosts."""
    if type(group) is not dict:
        return False
    names = [group.get("instance_group_name"), group.get("instance_type", "")]
    hosts = group.get("hosts")
    return type(hosts) is list and all(type(name) is str for name in [*names, *hosts])


def _check_channels(content: dict[str, Any]) -> str:
    for name, channel in content.items():
        if not CHANNEL_NAME.fullmatch(name) or name in (".", ".."):
            return f"found the channel {name!r}; expected up to 64 letters, digits and ._-"
        if type(channel) is not dict:
            return f"found {json.dumps(channel)[:50]} for channel {name}; expected a JSON object"
    return ""


def _check_checkpoints(content: dict[str, Any]) -> str:
    path = content.get("LocalPath")
    return (
        ""
        if type(path) is str and path
        else "expected a JSON object with LocalPath, the path of a folder"
    )


def main() -> None:
    """Check the folder that the command line names.

    Exits with status 1 if a file is wrong.
    """
    try:
        check(Path(sys.argv[1]))
    except UserError as error:
        print(" ".join(str(error).split()))
        sys.exit(1)


if __name__ == "__main__":
    main()
