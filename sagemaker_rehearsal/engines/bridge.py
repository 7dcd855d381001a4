"""A network for hosts that are processes: a bridge, and a namespace for each.

It needs root and iproute2. All names begin with the owner's name, so that the next rehearsal finds
what a killed one left.
"""

import fcntl
import ipaddress
import itertools
import os
import random
import shutil
import socket
import struct
import subprocess

# Short, because a device's name has at most 15 characters.
PREFIX = "rh"


class Bridge:
    """The device `rhOWNER` of this machine, 10.N.0.1, for hosts at 10.N.0.2 and on.

    The bridge between them is in a network namespace of its own, where this machine's firewall does
    not apply. Docker's firewall rules, for example, drop what goes from one device of a bridge to
    another.
    """

    def __init__(self, owner: str) -> None:
        self.name = f"{PREFIX}{owner[:8]}"
        self.net = self._free_net()
        self.numbers = itertools.count(2)
        self.switch = f"{self.name}-switch"
        self.address = f"{self.net}.0.1"
        ip("netns", "add", self.switch)
        ip("-netns", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-netns", self.switch, "link", "set", "bridge", "up")
        ip(
            "link",
            "add",
            self.name,
            "type",
            "veth",
            "peer",
            "name",
            "machine",
            "netns",
            self.switch,
        )
        ip("-netns", self.switch, "link", "set", "machine", "master", "bridge", "up")
        ip("address", "add", f"{self.address}/16", "dev", self.name)
        ip("link", "set", self.name, "up")

    def host(self) -> tuple[str, str]:
        """Make a host's network namespace; return its name and the host's address."""
        number = next(self.numbers)
        space = f"{self.name}-{number}"
        address = f"{self.net}.{number >> 8}.{number & 255}"
        port = f"port{number}"
        ip("netns", "add", space)
        peer = ["type", "veth", "peer", "name", "eth0", "netns", space]
        ip("-netns", self.switch, "link", "add", port, *peer)
        ip("-netns", self.switch, "link", "set", port, "master", "bridge", "up")
        ip("-netns", space, "address", "add", f"{address}/16", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-netns", space, "link", "set", device, "up")
        return space, address

    def _free_net(self) -> str:
        """Return a free 10.N, to which no route of this machine leads."""
        routes = ip("-4", "route")
        return next(
            net
            for net in (f"10.{n}" for n in random.sample(range(64, 250), 186))
            if f"{net}." not in routes
        )


def of_docker(network: dict) -> str:
    """Return this machine's address on Docker's bridge.

    `network` is what `docker network inspect bridge` prints. An engine that made the bridge itself
    at its start has no Gateway in it (docker.io 20.10.24 on a fresh Debian 12); then the address is
    read from the device.
    """
    configs = [
        config
        for config in network["IPAM"]["Config"] or []
        if ipaddress.ip_network(config["Subnet"]).version == 4
    ]
    if configs and configs[0].get("Gateway"):
        return configs[0]["Gateway"]
    name = (network.get("Options") or {}).get("com.docker.network.bridge.name", "docker0")
    # SIOCGIFADDR: netdevice(7)
    request = 0x8915
    argument = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, request, argument)[20:24])
    except OSError as error:
        if not configs:
            raise ValueError(
                f"Docker's bridge: found no address of {name}: {error.strerror}"
            ) from error
        return str(next(ipaddress.ip_network(configs[0]["Subnet"]).hosts()))


def possible() -> bool:
    """Return whether this user can make networks: root, with iproute2."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def remove(owner: str) -> int:
    """Remove an owner's namespaces and all devices that end in them; return how many."""
    if not possible():
        return 0
    spaces = [
        line.split()[0]
        for line in ip("netns", "list").splitlines()
        if line.startswith(f"{PREFIX}{owner[:8]}-")
    ]
    for space in spaces:
        ip("netns", "delete", space)
    return len(spaces)


def ip(*arguments: str) -> str:
    """Run iproute2's ip and return what it prints."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
