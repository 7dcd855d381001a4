"""app/rendezvous.py: the variables of torch.distributed, and an interface that is not there."""

import socket

from app import rendezvous
from app.environment import Environment


def test_one_host_needs_nothing():
    assert rendezvous.torch_distributed(Environment()) == {}


def test_the_first_host_as_sagemaker_sorts_them_is_the_main_one():
    environment = Environment(hosts=("algo-1", "algo-10", "algo-2"), current_host="algo-2")
    assert rendezvous.torch_distributed(environment) == {
        "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777", "NODE_RANK": "2"
    }  # fmt: skip


def test_an_interface_that_this_machine_has_not_is_forgotten(capsys):
    """SDK 3's local mode says ethwe where there is eth0."""
    variables = {"NCCL_SOCKET_IFNAME": "ethwe", "GLOO_SOCKET_IFNAME": "ethwe", "NCCL_DEBUG": "INFO"}
    rendezvous.forget_absent_interface(Environment(network_interface="ethwe"), variables)
    assert variables == {"NCCL_DEBUG": "INFO"}
    assert "warning: NCCL_SOCKET_IFNAME=ethwe is ignored" in capsys.readouterr().err


def test_an_interface_that_is_there_or_that_the_user_named_stays():
    there = socket.if_nameindex()[0][1]
    for interface, variable in ((there, there), ("ethwe", "ib0"), (None, "ethwe")):
        variables = {"NCCL_SOCKET_IFNAME": variable}
        rendezvous.forget_absent_interface(Environment(network_interface=interface), variables)
        assert variables == {"NCCL_SOCKET_IFNAME": variable}
