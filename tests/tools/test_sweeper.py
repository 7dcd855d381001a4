"""sweeper.py: a killed run of the tests leaves nothing behind.

Neither a process nor a container, a network or a mount.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from containers import ROOT, docker, no_engine
from environments import python_of
from waiting import becomes_true

pytestmark = [pytest.mark.slow, pytest.mark.root]

NETWORK = Path("/sys/class/net")
# A test that starts what tests start, and then stands still.
RUN_THAT_STANDS_STILL = """
import os, subprocess, sys, time
from pathlib import Path
from containers import docker, no_engine
from rehearsals import Rehearsal
import sweeper

def test_a_sweeper_ends_what_stands_still(tmp_path, monkeypatch):
    subprocess.Popen(["sh", "-c", f"sleep 1000; : {tmp_path}"], start_new_session=True)
    folder = tmp_path / "mounted"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    if no_engine() is None:
        docker("network", "create", f"test-{os.environ[sweeper.RUN_VARIABLE]}")
    # The hosts of a rehearsal are in namespaces and have an environment of their own. One of the
    # two rehearsals is dead already.
    monkeypatch.setenv("REHEARSAL_PYTHON", sys.executable)
    for name in ("dead", "alive"):
        server = Rehearsal(tmp_path / name, "--engine=processes")
        server.start()
        server.s3.create_bucket(Bucket="rehearsal")
        server.create("none", hosts=2)
        hosts = ["pgrep", "--full", f"{server.cache}/.*/jobs/"]
        while subprocess.run(hosts, capture_output=True).stdout.count(b"\\n") < 2:
            time.sleep(0.1)
        if name == "dead":
            server.kill(guard=True)
    Path("stands").write_text(os.environ[sweeper.RUN_VARIABLE])
    time.sleep(1000)
"""


def remains_of(folder: Path, owners: list[str], run: str) -> dict[str, list[str]]:
    """Return what is left of a run in `folder`, and of its rehearsals.

    The names of the rehearsals' networks contain their owners.
    """
    names = [text_line.split()[0] for text_line in output_lines("ip", "netns", "list")] + [
        path.name for path in NETWORK.iterdir()
    ]
    networks = (
        []
        if no_engine()
        else docker("network", "ls", "--quiet", f"--filter=name={run}").stdout.split()
    )
    return {
        "processes": output_lines("pgrep", "--full", "--list-full", str(folder)),
        "mounts": [
            text_line
            for text_line in Path("/proc/self/mountinfo").read_text().splitlines()
            if f" {folder}/" in text_line
        ],
        "network namespaces and devices": [name for name in names if name[2:10] in owners],
        "networks of Docker": networks,
    }


def output_lines(*words: str) -> list[str]:
    return subprocess.run(words, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.thorough  # it runs pytest in pytest
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_a_run_that_is_killed_leaves_nothing(tmp_path: Path, number):
    python_of("rehearsal")
    (tmp_path / "test_one.py").write_text(RUN_THAT_STANDS_STILL)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        f"--rootdir={tmp_path}",
        f"--basetemp={tmp_path / 'run'}",
    ]
    paths = [ROOT, *(ROOT / folder for folder in ("tests", "tests/support", "tests/tools"))]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [*command, "test_one.py"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": ":".join(map(str, paths))},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        assert becomes_true(lambda: (tmp_path / "stands").exists() or run.poll() is not None, 120)
        assert run.poll() is None, (tmp_path / "log").read_text()
        owners = sorted(
            {
                path.name[:8]
                for path in tmp_path.glob("run/*/*/cache/sagemaker-lightning-rehearsal/*")
            }
        )
        arguments = tmp_path, owners, (tmp_path / "stands").read_text()
        assert len(owners) == 2 and all(
            leftovers or "Docker" in thing for thing, leftovers in remains_of(*arguments).items()
        ), remains_of(*arguments)
        run.send_signal(number)
        run.wait(120)
        becomes_true(lambda: not any(remains_of(*arguments).values()), 60)
        assert not any(remains_of(*arguments).values()), remains_of(*arguments)
    finally:
        run.kill()
        run.wait()
