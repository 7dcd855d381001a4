"""contract/rendezvous.py: variables of torch.distributed and of the network.

And the wait for the names of the hosts.
"""

import itertools
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import sagemaker_lightning
from sagemaker_lightning.contract import rendezvous
from sagemaker_lightning.contract.environment import SageMakerEnvironment
from sagemaker_lightning.contract.errors import UserError

TWO_HOSTS = SageMakerEnvironment(hosts=("algo-1", "algo-2"), current_host="algo-2")
INTERFACE = socket.if_nameindex()[0][1]


def test_one_host_needs_nothing():
    assert rendezvous.variables(SageMakerEnvironment(network_interface=INTERFACE)) == {}


def test_the_first_host_as_sagemaker_sorts_them_is_the_main_one():
    environment = SageMakerEnvironment(hosts=("algo-1", "algo-10", "algo-2"), current_host="algo-2")
    assert rendezvous.torch_distributed(environment) == {
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "7777",
        "NODE_RANK": "2",
    }


def test_a_host_that_takes_no_part_has_no_rank():
    assert (
        rendezvous.torch_distributed(
            SageMakerEnvironment(hosts=("algo-2", "algo-3"), current_host="algo-1")
        )
        == {}
    )


@pytest.mark.parametrize("port", ["", "http", "-1", "0", "65535"])
def test_the_port_that_the_user_set(port):
    assert rendezvous.main_port({}) == 7777
    for allowed in (1, 29500, 65534):
        assert rendezvous.main_port({"MASTER_PORT": str(allowed)}) == allowed
    with pytest.raises(UserError, match=f"MASTER_PORT: found '{port}', expected a number"):
        rendezvous.main_port({"MASTER_PORT": port})


@pytest.mark.parametrize(
    ("named", "expected"), [(INTERFACE, INTERFACE), ("ethwe", None), (None, None)]
)
def test_only_an_interface_that_this_machine_has_is_named(tmp_path, named, expected):
    environment = SageMakerEnvironment(
        hosts=TWO_HOSTS.hosts, current_host="algo-2", network_interface=named
    )
    variables_set = rendezvous.network(environment, devices=tmp_path)
    assert variables_set == (
        dict.fromkeys(["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"], expected) if expected else {}
    )


@pytest.mark.parametrize(
    ("provider", "where"), [(True, "PATH"), (False, "PATH"), (True, "EFA"), (False, "nowhere")]
)
def test_efa_is_where_its_device_and_its_provider_are(
    tmp_path, monkeypatch, capfd, provider, where
):
    """EFA has stand-ins here, one for its device and one for libfabric's tool.

    AWS's installer puts the tool into a folder of its own.
    """
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin/fi_info"
    tool.write_text(
        f'#!/bin/sh\necho "provider: efa"\n[ "$*" = "-p efa" ] && exit {0 if provider else 61}\n'
        "exit 1\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(
        rendezvous, "EFA_TOOLS", str(tmp_path / ("bin" if where == "EFA" else "none"))
    )
    if where == "PATH":
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert rendezvous.network(TWO_HOSTS, devices=tmp_path / "infiniband") == {}
    (tmp_path / "infiniband").mkdir()
    (tmp_path / "infiniband/uverbs0").touch()
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        assert rendezvous.network(TWO_HOSTS, devices=tmp_path / "infiniband") == (
            {"FI_PROVIDER": "efa"} if provider else {}
        )
        output = (tmp_path / "log").read_text()
    assert output.startswith("warning: this host has EFA devices") == (not provider)
    assert capfd.readouterr() == ("", "")  # what the tool prints is not for the job's log


def test_an_interface_that_this_machine_has_not_is_forgotten(capsys):
    """SDK 3's local mode names ethwe, but the container has eth0."""
    variables = {"NCCL_SOCKET_IFNAME": "ethwe", "GLOO_SOCKET_IFNAME": "ethwe", "NCCL_DEBUG": "INFO"}
    rendezvous.forget_absent_interface(SageMakerEnvironment(network_interface="ethwe"), variables)
    assert variables == {"NCCL_DEBUG": "INFO"}
    assert "warning: NCCL_SOCKET_IFNAME=ethwe is ignored" in capsys.readouterr().err


def test_an_interface_that_is_there_or_that_the_user_named_stays():
    for interface, variable in ((INTERFACE, INTERFACE), ("ethwe", "ib0"), (None, "ethwe")):
        variables = {"NCCL_SOCKET_IFNAME": variable}
        rendezvous.forget_absent_interface(
            SageMakerEnvironment(network_interface=interface), variables
        )
        assert variables == {"NCCL_SOCKET_IFNAME": variable}


def test_hosts_join_and_one_host_does_nothing(monkeypatch):
    """What the user has set stays, but for an interface that this machine has not."""
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: asked.append(host))
    named = {"NCCL_SOCKET_IFNAME": "ethwe"}
    variables = dict(named)
    rendezvous.join(SageMakerEnvironment(network_interface="ethwe"), variables)
    assert variables == named and asked == []
    variables |= {"MASTER_PORT": "29500"}
    two_hosts = replace(TWO_HOSTS, network_interface="ethwe")
    rendezvous.join(two_hosts, variables)
    assert asked == ["algo-1", "algo-2"]
    assert {name: variables.get(name) for name in (*named, "MASTER_ADDR", "MASTER_PORT")} == {
        "NCCL_SOCKET_IFNAME": None,
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "29500",
    }
    assert variables["NODE_RANK"] == "1"


def test_a_program_that_nobody_of_ours_has_started_joins_the_hosts_itself(monkeypatch):
    """By one line; before it, what Lightning reads is missing."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: None)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.setenv(name, "")  # it is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    with pytest.raises(UserError) as raised:
        rendezvous.check_joined(TWO_HOSTS, os.environ)
    assert str(raised.value) == (
        "Trainer(num_nodes=...): found 2 hosts, and no MASTER_ADDR and no NODE_RANK on algo-2, "
        "expected both, which the Trainer reads when it is made; call "
        "sagemaker_lightning.join_hosts() before"
    )
    os.environ["MASTER_ADDR"] = "algo-1"
    with pytest.raises(UserError, match="found 2 hosts, and no NODE_RANK on algo-2"):
        rendezvous.check_joined(TWO_HOSTS, os.environ)
    sagemaker_lightning.join_hosts()
    rendezvous.check_joined(TWO_HOSTS, os.environ)
    names = "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"
    assert [os.environ[name] for name in names] == ["algo-1", "7777", "1"]
    rendezvous.check_joined(SageMakerEnvironment(), {})  # there is no other host


def test_what_the_toolkits_hook_has_done_is_not_done_again(monkeypatch):
    """It has waited for the names, and set the variables of the program."""
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: asked.append(host))
    assert rendezvous.prepared(replace(TWO_HOSTS, watch=Path("/watch"))) == {} and asked == []
    assert rendezvous.prepared(TWO_HOSTS)["MASTER_ADDR"] == "algo-1"
    assert asked == ["algo-1", "algo-2"]


@pytest.mark.slow
def test_a_name_that_never_resolves_is_named():
    # .invalid never resolves (RFC 6761); the first host resolves.
    says = r"host algo-2.invalid: its name did not resolve within [123] s \(.*TIMEOUT"
    with pytest.raises(UserError, match=says):
        rendezvous.wait_for_names(("localhost", "algo-2.invalid"), limit=1)


def test_the_wait_for_names_ends_with_its_limit(monkeypatch):
    """The wait for names ends at its limit, which is for all hosts together.

    The clock is the test's: the pauses before the last one add up to 0.475 s, and the next one
    would be 0.3375 s.
    """
    clock = [100.0]
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] = round(clock[0] + seconds, 6)

    def resolve(host, port) -> None:
        if host != "there":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(
        rendezvous, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    says = r"host algo-2: its name did not resolve within 1 s \(no such name\)"
    with pytest.raises(UserError, match=says):
        rendezvous.wait_for_names(("there", "algo-2"), limit=0.625)
    assert slept == pytest.approx([0.1, 0.15, 0.225, 0.15])


@pytest.mark.slow
def test_a_name_that_resolves_later_is_waited_for(monkeypatch):
    """The real resolver is asked for another name the first three times."""
    names_asked = []
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port: names_asked.append(host) or real(_late(host, names_asked), port),
    )
    rendezvous.wait_for_names(("algo-2",), limit=30)
    assert len(names_asked) == 4


def _late(host: str, names_asked: list[str]) -> str:
    return "localhost" if len(names_asked) > 3 else f"{host}.invalid"


def test_pauses_grow_up_to_a_limit():
    pauses = rendezvous.pauses()
    seconds = [next(pauses) for _ in range(20)]
    assert seconds == sorted(seconds) and seconds[0] == 0.1 and seconds[-1] == 5
    assert next(itertools.islice(pauses, 5000, None)) == 5  # hours later


def test_a_free_port_is_not_one_that_the_kernel_gives_to_others():
    """Ranks that are late would find it taken: gloo has one in each rank and group."""
    first = int(rendezvous.GIVEN_PORTS.read_text().split()[0])
    assert {rendezvous.free_port() < first for _ in range(20)} == {True}


@pytest.mark.parametrize("given", [True, False])
def test_a_free_port_is_free(tmp_path: Path, monkeypatch, given: bool):
    """Also where the kernel gives them all, or does not say which."""
    with socket.create_server(("127.0.0.1", rendezvous.free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(rendezvous, "FIRST_FREE_PORT", port)
        monkeypatch.setattr(rendezvous, "GIVEN_PORTS", tmp_path / "range")
        if given:
            (tmp_path / "range").write_text(f"{port + 1}\t60999\n")
        found = rendezvous.free_port()
        assert found != port
        socket.create_server(("127.0.0.1", found)).close()
