"""What a job of the zoo runs: the application, in a process that may interrupt itself.

    python program.py FLAGS              as app/train.py; --trainer.devices=N makes Lightning start
                                         N ranks
    python program.py torchrun FLAGS     as app/train_torchrun.py
    python program.py script FILE ...    a program of the user's own

ZOO_AT is `RANK HOOK DELAY SIGNAL WHOM`. DELAY seconds after Lightning calls its HOOK-th hook in
this rank, SIGNAL is sent to WHOM: "self", "root" (the process that was started) or "all". So the
moments are spread over training, validation and saving, and not over the start, which takes longer
than these small runs. HOOK may be `NAME:NUMBER`, the NUMBER-th hook of this name. ZOO_COUNT is a
file for the number of hooks at the end, and ZOO_SENT one that says that the signal was sent.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
hooks = 0


def main() -> None:
    """Be the program that the command line names."""
    os.environ.setdefault("ZOO_ROOT", str(os.getpid()))
    mode, rest = (
        (sys.argv[1], sys.argv[2:])
        if sys.argv[1] in ("torchrun", "script")
        else ("train", sys.argv[1:])
    )
    if mode == "torchrun":
        from sagemaker_lightning.launch import torchrun_command

        torchrun_command.main(Path(__file__).resolve(), rest)
        return
    count_hooks()
    if mode == "script":
        start_ranks_here(rest)
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")
        return
    from app import train_multi_node

    train_multi_node.main()


def start_ranks_here(script: list[str]) -> None:
    """Let the ranks that Lightning starts for a script be such programs, too."""
    from pytorch_lightning.strategies.launchers import subprocess_script

    command = [sys.executable, str(Path(__file__).resolve()), "script", *script]
    subprocess_script._basic_subprocess_cmd = lambda: list(command)


def count_hooks() -> None:
    """Count the hooks that Lightning calls, and interrupt at the one that is asked for."""
    from pytorch_lightning.trainer import call

    rank = int(os.environ.get("LOCAL_RANK", 0))
    at = os.environ.get("ZOO_AT", "").split()
    mine = bool(at) and int(at[0]) == rank
    name, _, number = at[1].rpartition(":") if mine else ("", "", "0")
    process = os.getpid()
    named = 0

    def counted(function, counts=True):
        def called(trainer, hook, *args, **kwargs):
            global hooks
            nonlocal named
            hooks += counts
            named += hook == name
            is_last = named == int(number) and hook == name if name else hooks == int(number)
            if is_last and (name or counts) and os.getpid() == process:
                threading.Thread(
                    target=interrupt, args=(float(at[2]), int(at[3]), at[4]), daemon=True
                ).start()
            return function(trainer, hook, *args, **kwargs)

        return called

    call._call_callback_hooks = counted(call._call_callback_hooks)
    call._call_lightning_module_hook = counted(call._call_lightning_module_hook)
    # The strategy's hooks are those of a batch's parts: the moments drawn are not among them.
    call._call_strategy_hook = counted(call._call_strategy_hook, counts=False)
    if (file := os.environ.get("ZOO_COUNT")) and rank == 0:
        import atexit

        atexit.register(lambda: os.getpid() == process and Path(file).write_text(str(hooks)))


def interrupt(delay: float, number: int, whom: str) -> None:
    """Send a signal; SIGKILL to all acts as the end of the host: no process does anything more."""
    time.sleep(delay)
    root = psutil.Process(int(os.environ["ZOO_ROOT"]))
    Path(os.environ["ZOO_SENT"]).write_text(f"{hooks} {time.time()}")
    if whom == "self":
        os.kill(os.getpid(), number)
        return
    chosen = [root, *(root.children(recursive=True) if whom == "all" else [])]
    if number == signal.SIGKILL:
        for process in chosen:
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.Error):
                    process.suspend()
    # Another process sends it: data workers obey a SIGTERM from their parent.
    subprocess.run(
        ["kill", f"-{number}", *(str(process.pid) for process in chosen)], stderr=subprocess.DEVNULL
    )


if __name__ == "__main__":
    main()
