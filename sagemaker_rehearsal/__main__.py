"""Rehearses SageMaker training jobs on this machine, spot interruptions included.

make rehearsal                                serves http://127.0.0.1:4571 until Ctrl-C
python -m sagemaker_rehearsal exec -- python my_estimator.py
                                              runs a client that never reaches AWS
python -m sagemaker_rehearsal interrupt JOB             takes the job's spot instances away
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

    from sagemaker_lightning.contract.errors import printable
    from sagemaker_rehearsal import owner, session, settings
    from sagemaker_rehearsal.api import clients, gate
    from sagemaker_rehearsal.api.access_keys import Key
except ImportError as missing:
    sys.exit(
        f"error: {sys.executable} has no {missing.name}; `make rehearsal` makes .venvs/rehearsal, "
        "use its python; or install the extra `rehearsal` of this package"
    )

RULES = """
A rule of --interrupt is a time: 'at 40s', 'at step 120', 'every 5m', 'every ~5m' (at random, 5
minutes on average) or 'every ~20s 100 times'. These may follow: 'of algo-2', 'of any' or 'of all'
(default); then 'warned' (default: SIGTERM, --grace seconds, SIGKILL), 'unwarned' (SIGKILL) or
'either'; then 'gap 30s', a time without capacity.
"""


def main() -> None:
    """Run the command that the command line names; "serve" if it names none."""
    # Neither a path nor a job's text has to have the terminal's letters.
    if sys.stdout:
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        prog="python -m sagemaker_rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve the endpoint; what is done without a command",
        usage="%(prog)s [FLAG]...",
        epilog=RULES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings.add_flags(serve)
    # Without a command, its flags are those of the program.
    parser.epilog = serve.format_help()
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
    known_words = {"serve", "exec", "interrupt", "-h", "--help"}
    args = parser.parse_args(
        sys.argv[1:] if known_words & set(sys.argv[1:2]) else ["serve", *sys.argv[1:]]
    )
    try:
        {"serve": _serve, "exec": _exec, "interrupt": _interrupt}[args.command](args)
    except (ValueError, OSError) as error:
        # It may be what a job's program has written, and a terminal obeys control sequences.
        sys.exit("error: " + printable(str(error), kept="\n"))


def _serve(args: argparse.Namespace) -> None:
    ended = threading.Event()
    hurry = threading.Event()

    def request_stop(*_) -> None:
        """On the first Ctrl-C, stop the jobs; on the second, kill them."""
        (hurry if ended.is_set() else ended).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    session.serve(settings.from_flags(args), ended, hurry)


def _exec(args: argparse.Namespace) -> None:
    key = owner.key_of(clients.own(args.endpoint))
    # Fails with one line if no rehearsal of ours answers.
    ask(args.endpoint, key, "")
    environment = clients.variables(args.endpoint, key)
    program = shutil.which(args.line[0])
    if program is None:
        raise ValueError(f"exec: found no program {args.line[0]!r}")
    os.execve(program, args.line, environment)


def _interrupt(args: argparse.Namespace) -> None:
    request = {"name": args.job, "hosts": args.host, "warned": not args.unwarned, "gap": args.gap}
    key = owner.key_of(clients.own(args.endpoint))
    print(ask(args.endpoint, key, "interrupt", json.dumps(request).encode())["done"])


def ask(endpoint: str, key: Key, what: str, content: bytes | None = None) -> dict:
    """Send a request to a rehearsal and return its answer.

    Args:
        endpoint: The rehearsal's address.
        key: The person's key, which signs the request.
        what: The path below /Rehearsal/; "" lists the jobs.
        content: The body of a POST; None for a GET.

    Raises ValueError with the reason if there is no answer, or a refusal.
    """
    address = f"{clients.own(endpoint).rstrip('/')}/Rehearsal/{what}"
    signed = AWSRequest("POST" if content else "GET", address, data=content)
    SigV4Auth(Credentials(key.id, key.secret), gate.OWN_SERVICE, clients.REGION).add_auth(signed)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(address, data=content, headers=dict(signed.headers))
        with opener.open(request, timeout=10) as answer:
            answer_content = json.load(answer)
    except urllib.error.HTTPError as error:
        answer_content = json.loads(error.read() or b"{}") if error.code == 409 else {}
        raise ValueError(
            answer_content.get("error") or f"--endpoint: {endpoint} is no rehearsal's"
        ) from None
    except (urllib.error.URLError, ValueError, TimeoutError):
        raise ValueError(
            f"--endpoint: no rehearsal answers at {endpoint}; start one by `make rehearsal`"
        ) from None
    return answer_content


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    main()
