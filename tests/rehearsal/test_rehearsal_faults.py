"""Faults of real processes, networks and disks, by functions that need no rehearsal."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from waiting import wait_until

from sagemaker_lightning.contract.process_stat import process_stat
from sagemaker_rehearsal import faults
from sagemaker_rehearsal.faults import disks, networks, ranks
from sagemaker_rehearsal.faults.clocks import check_shifted
from sagemaker_rehearsal.faults.errors import CannotInject, run

HANG_SECONDS = 3  # what is not so by then never is

pytestmark = pytest.mark.slow


@pytest.fixture
def start() -> Iterator[Callable]:
    """Start processes; all of their groups are killed at the end."""
    processes = []

    def start_one(*command: str, **variables: str) -> subprocess.Popen:
        environment = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"} | variables
        processes.append(
            subprocess.Popen(
                command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL
            )
        )
        return processes[-1]

    yield start_one
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def variable_of(pid: int, name: str) -> str:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries).get(name, "")


def state_of(process: subprocess.Popen) -> str:
    return process_stat(process.pid)[0]


# Ranks

LAUNCHERS = {
    # Each rank has a child, as a data worker, that inherits its variables.
    "torchrun": (
        "for r in 0 1; do TORCHELASTIC_RUN_ID=x LOCAL_RANK=$r IS=rank-$r sh -c 'sleep 60 & wait' "
        "& done; wait",
        {0: "rank-0", 1: "rank-1"},
    ),
    "torchrun whose first rank has died": (
        "TORCHELASTIC_RUN_ID=x LOCAL_RANK=1 IS=rank-1 sleep 60 & wait",
        {1: "rank-1"},
    ),
    "Lightning": (
        "IS=rank-0 sh -c 'LOCAL_RANK=1 IS=rank-1 sleep 60 & wait' & wait",
        {0: "rank-0", 1: "rank-1"},
    ),
    "one process": (
        "sleep 60 & IS=rank-0 sh -c 'while :; do :; done' & wait",
        {0: "rank-0"},
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_ranks_of_a_launcher_are_found(start, launcher):
    script, expected = LAUNCHERS[launcher]
    process = start("sh", "-c", script)

    def found() -> dict[int, str]:
        try:
            return {
                number: variable_of(pid, "IS")
                for number, pid in faults.find_ranks(process.pid).items()
            }
        except OSError:  # it is about to start
            return {}

    wait_until(lambda: found() == expected)


def test_ranks_that_were_forked_are_known_by_their_names(start, tmp_path):
    """The process that forks them has the variables of a rank (launch/warm_start.py)."""
    script = tmp_path / "launch/warm_start.py"
    script.parent.mkdir()
    script.write_text(
        "import os, time\n"
        "for rank in (0, 1):\n"
        "    if not os.fork():\n"
        "        open('/proc/self/comm', 'w').write(f'rank-{rank}')\n"
        "        break\n"
        "time.sleep(60)\n"
    )
    process = start(sys.executable, str(script), LOCAL_RANK="0")
    wait_until(lambda: len(faults.find_ranks(process.pid)) == 2)
    found = faults.find_ranks(process.pid)
    assert list(found) == [0, 1] and process.pid not in found.values()


def test_a_process_that_has_ended_has_no_ranks_and_takes_no_fault(start):
    process = start("true")
    process.wait()
    assert faults.find_ranks(process.pid) == {}
    for fault in (faults.kill, faults.freeze, faults.slow):
        with pytest.raises(CannotInject, match=f"^process {process.pid} has ended$"):
            fault(process.pid)


def test_a_rank_is_killed(start):
    process = start("sleep", "60")
    faults.kill(process.pid)
    assert process.wait() == -signal.SIGKILL


def test_a_rank_is_frozen_until_it_is_let_go(start):
    process = start("sleep", "60")
    thaw = faults.freeze(process.pid)
    wait_until(lambda: state_of(process) == "T")
    thaw()
    wait_until(lambda: state_of(process) != "T")


def test_a_frozen_rank_that_has_ended_is_not_let_go(start, monkeypatch):
    """Its number may be another process's."""
    process = start("sleep", "60")
    thaw = faults.freeze(process.pid)
    process.kill()
    process.wait()
    monkeypatch.setattr(ranks, "_signal", lambda *_: pytest.fail("another process got a signal"))
    thaw()


def test_a_rank_that_is_slowed_stands_still_most_of_the_time(start):
    process = start("sh", "-c", "while :; do :; done")
    end = faults.slow(process.pid)
    states = []

    def both_seen() -> bool:
        states.append(state_of(process))
        return {"T", "R"} <= set(states) and len(states) > 100

    wait_until(both_seen)
    end()
    assert states.count("T") > states.count("R")
    wait_until(lambda: state_of(process) != "T")


def test_slowing_ends_with_the_rank(start):
    process = start("sleep", "60")
    end = faults.slow(process.pid)
    process.kill()
    process.wait()
    end()


# Networks


CONNECTS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
try:
    socket.create_connection(server.getsockname(), timeout=0.5).close()
except TimeoutError:
    sys.exit(3)
"""


@pytest.fixture
def space(start) -> int:
    """A process with a network of its own, in which only lo is up, and with its own mounts."""
    process = start("unshare", "--net", "--mount", "sh", "-c", "ip link set lo up && sleep 60")
    own = Path("/proc/self/ns/net").readlink()
    wait_until(lambda: Path(f"/proc/{process.pid}/ns/net").readlink() != own)
    wait_until(lambda: "127.0.0.1" in inside(process.pid, "ip", "address").stdout)
    return process.pid


def inside(pid: int, *command: str) -> subprocess.CompletedProcess:
    """Run a command in a process's namespaces."""
    enter = ["nsenter", f"--target={pid}", "--net", "--mount"]
    return subprocess.run([*enter, *command], capture_output=True, text=True)


def connects(pid: int) -> bool:
    """Return whether a connection in a process's network comes about."""
    status = inside(pid, sys.executable, "-c", CONNECTS).returncode
    assert status in (0, 3)
    return status == 0


@pytest.mark.root
def test_a_network_that_is_cut_loses_all_packets_until_it_is_mended(space):
    assert connects(space)
    mend = faults.cut_network(space, "lo")
    assert not connects(space)
    mend()
    assert connects(space)


@pytest.mark.root
def test_a_lossy_network_loses_a_share(space):
    mend = faults.lose_packets(space, "lo", share=0.25)
    rules = inside(space, "iptables", "-S").stdout
    assert rules.count("--mode random --probability 0.25") == 2
    mend()
    assert "statistic" not in inside(space, "iptables", "-S").stdout
    faults.lose_packets(space, "lo", share=1.0)
    assert not connects(space)


@pytest.mark.root
def test_a_slow_network_has_a_rate(space):
    mend = faults.slow_network(space, "lo")
    assert "tbf" in (shown := inside(space, "tc", "qdisc", "show", "dev", "lo").stdout)
    assert "rate 1Mbit" in shown and connects(space)
    with pytest.raises(CannotInject, match="tc qdisc add"):
        faults.slow_network(space, "lo")
    mend()
    assert "tbf" not in inside(space, "tc", "qdisc", "show", "dev", "lo").stdout


@pytest.mark.root
def test_half_of_a_cut_is_taken_back(space, monkeypatch):
    """Where the second rule fails, the first is not left."""

    def refuse(command: list[str]) -> str:
        if "OUTPUT" in command:
            raise CannotInject("x")
        return run(command)

    monkeypatch.setattr(networks, "run", refuse)
    with pytest.raises(CannotInject, match="^x$"):
        faults.cut_network(space, "lo")
    assert "DROP" not in inside(space, "iptables", "-S").stdout


@pytest.mark.root
@pytest.mark.parametrize(
    "fault",
    [faults.cut_network, faults.lose_packets, faults.slow_network],
    ids=lambda f: f.__name__,
)
def test_this_machines_network_is_left_alone(start, fault, monkeypatch):
    monkeypatch.setattr(networks, "run", lambda _: pytest.fail("it is not left alone"))
    process = start("sleep", "60")
    with pytest.raises(CannotInject, match="the host has no network of its own, but this machine"):
        fault(process.pid)
    process.kill()
    process.wait()
    with pytest.raises(CannotInject, match="has ended"):
        fault(process.pid)


def test_a_line_says_that_root_is_needed(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotInject, match="^it needs root$"):
        faults.cut_network(os.getpid())
    with pytest.raises(CannotInject, match="^it needs root$"):
        faults.fill_disk(os.getpid(), Path("/tmp"))


def test_a_missing_program_is_named():
    with pytest.raises(CannotInject, match="^it needs no-such-tool, which is not installed$"):
        run(["no-such-tool", "x"])


# Disks

# Has the page of one file at each moment, and exits with the number of the error.
WRITES_AGAIN = """
import itertools, os, sys
os.mkdir(sys.argv[1])
for number in itertools.count():
    try:
        with open(f"{sys.argv[1]}/one", "w") as file:
            file.write(str(number))
    except OSError as error:
        sys.exit(error.errno)
"""


@pytest.mark.root
def test_a_full_disk_takes_nothing_more_and_gives_what_it_has(space, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "old").write_text("content")
    empty = faults.fill_disk(space, folder)
    written = inside(space, "sh", "-c", f"cat {folder}/old && cp {folder}/old {folder}/new")
    assert written.stdout == "content" and os.strerror(errno.ENOSPC) in written.stderr
    (folder / "outside").write_text("this machine's disk is not full")
    empty()
    assert inside(space, "sh", "-c", f"echo new >{folder}/new").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]
    assert sorted(path.name for path in folder.iterdir()) == ["new", "old", "outside"]


@pytest.mark.root
def test_a_file_that_is_written_while_the_disk_fills_up_finds_it_full(
    space, start, tmp_path, monkeypatch
):
    slowly = "    import time; time.sleep(0.3)\n    rest = "
    monkeypatch.setattr(disks, "FILL", disks.FILL.replace("    rest = ", slowly))
    enter = ["nsenter", f"--target={space}", "--mount", sys.executable, "-c"]
    writer = start(*enter, WRITES_AGAIN, str(tmp_path / "checkpoints"))
    wait_until((tmp_path / "checkpoints/one").exists)
    faults.fill_disk(space, tmp_path / "checkpoints")
    assert writer.wait(HANG_SECONDS) == errno.ENOSPC


@pytest.mark.root
def test_a_disk_that_cannot_be_filled_is_reported(space, tmp_path):
    with pytest.raises(CannotInject, match="^mount: No such file or directory$"):
        faults.fill_disk(space, tmp_path / "none")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(CannotInject, match="No such file or directory: '.*/none/.full-"):
        faults.fill_disk(space, tmp_path / "none/folder")
    with pytest.raises(CannotInject, match="a letter that mount cannot take"):
        faults.fill_disk(space, tmp_path / "a,b")
    with pytest.raises(CannotInject, match="the host has no file systems of its own"):
        faults.fill_disk(os.getpid(), tmp_path)


# Files


def test_a_half_and_a_changed_bit():
    assert (faults.halve(b"abcde"), faults.halve(b""), faults.halve(b"a")) == (b"ab", b"", b"")
    content = bytes(range(16))
    for bit in (0, 7, 77, 127, 128):
        changed = faults.flip_bit(content, bit)
        different = int.from_bytes(changed, "little") ^ int.from_bytes(content, "little")
        assert different == 1 << (bit % 128)
    assert faults.flip_bit(b"", 3) == b""


def test_faults_need_the_standard_library_alone():
    """Neither a client of AWS nor torch or Lightning is imported."""
    code = (
        "import sys, sagemaker_rehearsal.faults\n"
        "print({'boto3', 'botocore', 'docker', 'moto', 'torch', 'pytorch_lightning', 'psutil'}"
        " & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


CLOCKS = """
import time
monotonic, wall = time.monotonic(), time.time()
for _ in range(200):
    time.sleep(0.05)
    print(round(time.time() - wall - (time.monotonic() - monotonic)), flush=True)
"""


@pytest.mark.slow
def test_a_clock_is_an_hour_ahead_and_right_again(tmp_path):
    """Monotonic time, by which waits are measured, stays as it is."""
    pytest.importorskip("libfaketime", reason="it takes a C compiler to install libfaketime")
    variables = faults.preload_clock(tmp_path / "clock")
    process = subprocess.Popen(
        [sys.executable, "-c", CLOCKS],
        env={"PATH": "/usr/bin:/bin"} | variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = iter(process.stdout.readline, "")
    assert next(lines) == "0\n"
    set_right = faults.shift_clock(tmp_path / "clock")
    assert any(line == "3600\n" for line in lines)
    set_right()
    assert any(line == "0\n" for line in lines)
    set_back = faults.shift_clock(tmp_path / "clock", -60)
    assert any(line == "-60\n" for line in lines)
    set_back()
    process.kill()
    process.wait()


NOT_FOUND = b"warning\ndate: libc.so.6: version `GLIBC_2.38' not found"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"1764003600\n", None),
        (b"1764000000\n", "the clock of this image: 1764000000"),
        (b"ERROR: ld.so: ignored.\n1764000000\n", "of this image: 1764000000"),
        (NOT_FOUND, "of this image: date: libc.so.6: version `GLIBC_2.38' not found"),
        (b"", "the clock of this image: "),
    ],
)
def test_what_an_image_says_of_its_clock(said, why):
    """Another C library than this machine's is an error of the loader, or no shift."""
    with pytest.raises(CannotInject, match=why) if why else nullcontext():
        check_shifted(said, 1764000000.0)
