"""Rehearses SageMaker training jobs on this machine, spot interruptions included.

    make rehearsal                                              serves http://127.0.0.1:4571 until Ctrl-C
    python -m rehearsal exec -- python my_estimator.py  runs a client that reaches this endpoint, and AWS never
    python -m rehearsal interrupt JOB                   takes the job's spot instances away

A rule of --interrupt: 'at 40s', 'at step 120', 'every 5m', 'every ~5m' (at random, 5 minutes on average),
'every ~20s 100 times'; then, if wanted, 'of algo-2', 'of any', 'of all' (default); 'warned' (default: SIGTERM, --grace
seconds, SIGKILL), 'unwarned' (SIGKILL) or 'either'; 'gap 30s', without capacity.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

try:
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    from rehearsal import owner, session, settings
    from rehearsal.api import clients, gate
    from rehearsal.api.access_keys import Key
except ImportError as missing:
    sys.exit(
        f"error: {sys.executable} has no {missing.name}; `make rehearsal` makes .venvs/rehearsal, "
        "use its python"
    )


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    settings.add_flags(
        commands.add_parser("serve", help="serve the endpoint; what is done without a command")
    )
    execute = commands.add_parser("exec", help="run a client with this endpoint as its AWS")
    execute.add_argument("line", nargs="+", metavar="-- COMMAND ...")
    interrupt = commands.add_parser("interrupt", help="take spot instances of a job away")
    interrupt.add_argument("job", metavar="JOB")
    interrupt.add_argument(
        "--host", action="append", default=[], help="e.g. algo-2; may be repeated (default: all)"
    )
    interrupt.add_argument("--unwarned", action="store_true", help="no SIGTERM before SIGKILL")
    interrupt.add_argument(
        "--gap", type=float, default=0.0, help="seconds without capacity (default: %(default)s)"
    )
    for command in (execute, interrupt):
        default = os.environ.get("AWS_ENDPOINT_URL") or f"http://127.0.0.1:{settings.PORT}"
        command.add_argument(
            "--endpoint", default=default, help="of the rehearsal (default: %(default)s)"
        )
    known = {"serve", "exec", "interrupt", "-h", "--help"}
    args = parser.parse_args(
        sys.argv[1:] if known & set(sys.argv[1:2]) else ["serve", *sys.argv[1:]]
    )
    try:
        {"serve": _serve, "exec": _exec, "interrupt": _interrupt}[args.command](args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _serve(args: argparse.Namespace) -> None:
    ended, hurry = threading.Event(), threading.Event()

    def heard(*_) -> None:
        """The first Ctrl-C stops the jobs, the second one kills them."""
        (hurry if ended.is_set() else ended).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heard)
    session.serve(settings.from_flags(args), ended, hurry)


def _exec(args: argparse.Namespace) -> None:
    key = owner.key_of(clients.own(args.endpoint))
    ask(args.endpoint, key, "")  # refuses, in one line, where nothing of ours answers
    environment = clients.variables(args.endpoint, key)
    program = shutil.which(args.line[0])
    if program is None:
        raise ValueError(f"exec: found no program {args.line[0]!r}")
    os.execve(program, args.line, environment)


def _interrupt(args: argparse.Namespace) -> None:
    order = {"name": args.job, "hosts": args.host, "warned": not args.unwarned, "gap": args.gap}
    key = owner.key_of(clients.own(args.endpoint))
    print(ask(args.endpoint, key, "interrupt", json.dumps(order).encode())["done"])


def ask(endpoint: str, key: Key, what: str, content: bytes | None = None) -> dict:
    """Return the rehearsal's answer; ValueError says why there is none."""
    address = f"{clients.own(endpoint).rstrip('/')}/Rehearsal/{what}"
    signed = AWSRequest("POST" if content else "GET", address, data=content)
    SigV4Auth(Credentials(key.id, key.secret), gate.OWN, clients.REGION).add_auth(signed)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(address, data=content, headers=dict(signed.headers))
        with opener.open(request, timeout=10) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        found = json.loads(error.read() or b"{}") if error.code == 409 else {}
        raise ValueError(
            found.get("error") or f"--endpoint: {endpoint} is no rehearsal's"
        ) from None
    except (urllib.error.URLError, ValueError, TimeoutError):
        raise ValueError(
            f"--endpoint: no rehearsal answers at {endpoint}; start one by `make rehearsal`"
        ) from None
    return found


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    main()
