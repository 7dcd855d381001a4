"""Rehearses SageMaker training jobs on this machine, spot interruptions included.

python -m sagemaker_rehearsal                 serves http://127.0.0.1:4571 until Ctrl-C; in a
                                              checkout: make rehearsal
python -m sagemaker_rehearsal exec -- python my_estimator.py
                                              runs a client that never reaches AWS
python -m sagemaker_rehearsal interrupt JOB   takes the job's spot instances away
python -m sagemaker_rehearsal fault JOB FAULT lets a fault happen

list, logs, stop, report, compare, rerun and resume are for its jobs, too; `... COMMAND --help` says
more.
Installed as a package, its name is sagemaker-lightning-rehearsal.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from pathlib import Path

try:
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials
    from botocore.exceptions import BotoCoreError, ClientError

    from sagemaker_lightning.contract.command_line import Parser
    from sagemaker_lightning.contract.errors import plain, printable
    from sagemaker_lightning.launcher import aws, completion, jobs
    from sagemaker_lightning.launcher.command import HELP_COLUMNS, add_limits, positive
    from sagemaker_rehearsal import job_commands, owner, session, settings
    from sagemaker_rehearsal.api import gate
    from sagemaker_rehearsal.aws import clients
    from sagemaker_rehearsal.aws.access_keys import Key
    from sagemaker_rehearsal.faults.rules import KINDS
except ImportError as missing:
    sys.exit(
        f"error: {sys.executable} has no {missing.name}; install the extra `rehearsal` of "
        "sagemaker-lightning, or use the python of .venvs/rehearsal, which `make rehearsal` makes"
    )

FAULTS = (
    """

A fault is one of these; after 'rank' may be a rank's number, and 'any' is one that is drawn of
those that are possible:

"""
    + "".join(f"  {kind:17} {words}\n" for kind, words in KINDS.items())
    + """
Then may follow 'of algo-2', 'of any' (default) or 'of all', and, with what lasts, 'for 30s'; else
it lasts until the host's end.
"""
)
RULES = f"""
A rule of --interrupt is a time: 'at 40s', 'at step 120', 'every 5m', 'every ~5m' (at random, 5
minutes on average) or 'every ~20s 100 times'. These may follow: 'of algo-2', 'of any' or 'of all'
(default); then 'warned' (default: SIGTERM, --grace seconds, SIGKILL), 'unwarned' (SIGKILL) or
'either'; then 'gap 30s', a time without capacity.

A rule of --fault is a fault with such a time, as in 'freeze rank 1 at step 40 of algo-2 for 30s' or
'any every ~1m 10 times'.{FAULTS}"""


COMMANDS = {
    "list": ("print its newest jobs", "list"),
    "logs": ("print the log of a job", "logs JOB --follow"),
    "stop": ("stop a job, which has two minutes to save a checkpoint", "stop JOB"),
    "report": (
        "print what a job's report says first, and where it is, or its goodput for a program",
        "report JOB --format=json --fail-below=90%",
    ),
    "rerun": ("start a job once more, from its beginning, under a new name", "rerun JOB"),
    "resume": (
        "start a job that continues from the checkpoints of one that was stopped or failed",
        "resume JOB",
    ),
    "compare": (
        "run a job that has completed once more, without interruptions, and compare the bits of "
        "the models",
        "compare JOB",
    ),
    "interrupt": ("take spot instances of a job away", "interrupt JOB --host=algo-2 --unwarned"),
    "fault": ("let a fault happen in a job now", "fault JOB 'freeze rank 0 of algo-2 for 30s'"),
    "completion": (
        "print the script by which a shell completes commands and flags",
        "completion bash > ~/.local/share/bash-completion/completions/"
        "sagemaker-lightning-rehearsal",
    ),
    "exec": ("run a client with this endpoint as its AWS", "exec -- python my_estimator.py"),
}
"""What each command for a rehearsal that runs does, and an example."""


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
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
    default = os.environ.get("AWS_ENDPOINT_URL") or f"http://127.0.0.1:{settings.PORT}"
    by_name = {}
    for name, (text, example) in COMMANDS.items():
        command = by_name[name] = commands.add_parser(
            name,
            help=text,
            description=textwrap.fill(f"{text[0].upper()}{text[1:]}.", HELP_COLUMNS),
            epilog=f"example: {parser.prog} {example}",  # one line, to be copied
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == "completion":
            command.add_argument("shell", choices=completion.SHELLS)
            continue
        command.add_argument(
            "--endpoint", default=default, help="of the rehearsal (default: %(default)s)"
        )
        if name not in ("list", "exec"):
            command.add_argument("job", metavar="JOB")
        if name not in ("exec", "interrupt", "fault"):
            command.add_argument(
                "--region",
                default=clients.own_region(),
                help="of the client that has made the job (default: %(default)s)",
            )
    by_name["exec"].add_argument("line", nargs="+", metavar="-- COMMAND ...")
    by_name["list"].add_argument(
        "--last", type=positive, default=20, metavar="N", help="as many, at most (%(default)s)"
    )
    by_name["logs"].add_argument(
        "--follow", action="store_true", help="until the job ends, with its status"
    )
    add_limits(by_name["resume"].add_argument)
    add = by_name["report"].add_argument
    add(
        "--format",
        choices=("text", "json", "csv"),
        default="text",
        help="json and csv: the goodput as data (default: %(default)s)",
    )
    add(
        "--folder",
        type=Path,
        help="of the reports of a rehearsal that need not run any more (its --folder)",
    )
    settings.add_fail_below(by_name["report"])
    by_name["fault"].add_argument("fault", metavar="FAULT", help="one of those below, in quotes")
    by_name["fault"].epilog += FAULTS
    add = by_name["interrupt"].add_argument
    add("--host", action="append", default=[], help="e.g. algo-2; may be repeated (default: all)")
    add("--unwarned", action="store_true", help="no SIGTERM before SIGKILL")
    add("--gap", type=float, default=0.0, help="seconds without capacity (default: %(default)s)")
    return parser


def main() -> None:
    """Run the command that the command line names; "serve" if it names none."""
    # Neither a path nor a job's text has to have the terminal's letters.
    if sys.stdout:
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser()
    words = sys.argv[1:]
    if not {"serve", *COMMANDS, "-h", "--help"} & set(words[:1]):
        if words and not words[0].startswith("-"):
            commands = ", ".join(COMMANDS)
            parser.error(f"found {plain(words[0])!r}, expected a flag, or a command: {commands}")
        words = ["serve", *words]
    args = parser.parse_args(words)
    own = {
        "completion": _complete,
        "serve": _serve,
        "exec": _exec,
        "interrupt": _interrupt,
        "fault": _inject,
    }
    try:
        sys.exit(own.get(args.command, _for_jobs)(args))
    except (ValueError, OSError, ClientError, BotoCoreError) as error:
        # It may be what a job's program has written, and a terminal obeys control sequences.
        text = aws.explain(error) if isinstance(error, ClientError) else str(error)
        sys.exit("error: " + printable(text, kept="\n"))
    except KeyboardInterrupt:
        sys.exit(130)


def _for_jobs(args: argparse.Namespace) -> int | None:
    """Run a command of sagemaker_rehearsal/job_commands.py; return the exit status."""
    if args.command == "report" and args.folder:
        job_commands.show_report(None, args.job, args.folder, args.format, args.fail_below)
        return None
    site = job_commands.site_of(args.endpoint, args.region)
    if args.command == "list":
        jobs.show_list(site, args.last)
    elif args.command == "logs" and args.follow:
        return jobs.follow(site, args.job, job_commands.POLL_SECONDS)
    elif args.command == "resume":
        job_commands.resume(site, args.job, args.max_run, args.max_wait)
    elif args.command == "compare":
        key = owner.key_of(clients.own(args.endpoint))
        order = json.dumps({"name": args.job}).encode()
        other = ask(args.endpoint, key, "compare", order)["done"]
        folder = owner.reports_of(args.endpoint)
        return job_commands.show_comparison(site, args.job, other, folder)
    elif args.command == "report":
        folder = owner.reports_of(args.endpoint)
        job_commands.show_report(site, args.job, folder, args.format, args.fail_below)
    else:
        does = {
            "logs": jobs.show_log,
            "stop": jobs.stop,
            "rerun": job_commands.rerun,
        }
        does[args.command](site, args.job)
    return None


def _complete(args: argparse.Namespace) -> None:
    parser = _parser()
    # Without a command, its flags are those of the program.
    settings.add_flags(parser)
    completion.show(parser, "sagemaker-lightning-rehearsal", args.shell)


def _serve(args: argparse.Namespace) -> None:
    ended = threading.Event()
    immediately = threading.Event()

    def request_stop(*_) -> None:
        """On the first Ctrl-C, stop the jobs; on the second, kill them."""
        (immediately if ended.is_set() else ended).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    session.serve(settings.from_flags(args), ended, immediately)


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


def _inject(args: argparse.Namespace) -> None:
    key = owner.key_of(clients.own(args.endpoint))
    order = {"name": args.job, "fault": args.fault}
    print(ask(args.endpoint, key, "fault", json.dumps(order).encode())["done"])


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
            answer_content.get("error") or f"--endpoint: {endpoint} is not a rehearsal's"
        ) from None
    except (urllib.error.URLError, ValueError, TimeoutError):
        raise ValueError(
            f"--endpoint: no rehearsal answers at {endpoint}; start one by "
            "`sagemaker-lightning-rehearsal` (`make rehearsal` in a checkout)"
        ) from None
    return answer_content


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())
    main()
