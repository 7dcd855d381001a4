"""A network for hosts that are processes: a switch, and for each host a network namespace on it.

It needs root and iproute2. All names begin with the owner's, so that the next rehearsal finds what a killed one left.
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

PREFIX = "rh"  # a device's name has 15 characters at most


class Bridge:
    """The device `rhOWNER` of this machine, 10.N.0.1; the hosts' addresses are 10.N.0.2 and on.

    The bridge between them is in a namespace of its own, where this machine's firewall has no say: Docker's, for one,
    drops what goes from one device of a bridge to another.
    """

    def __init__(self, owner: str) -> None:
        self.name, self.net, self.numbers = (
            f"{PREFIX}{owner[:8]}",
            self._free_net(),
            itertools.count(2),
        )
        self.switch, self.address = f"{self.name}-switch", f"{self.net}.0.1"
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
        """Make a network namespace, and return its name and its address."""
        number = next(self.numbers)
        space, address = f"{self.name}-{number}", f"{self.net}.{number >> 8}.{number & 255}"
        port = f"port{number}"
        ip("netns", "add", space)
        ip(
            "-netns",
            self.switch,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            space,
        )
        ip("-netns", self.switch, "link", "set", port, "master", "bridge", "up")
        ip("-netns", space, "address", "add", f"{address}/16", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-netns", space, "link", "set", device, "up")
        return space, address

    def _free_net(self) -> str:
        """Return 10.N that no route of this machine leads to."""
        routes = ip("-4", "route")
        return next(
            net
            for net in (f"10.{n}" for n in random.sample(range(64, 250), 186))
            if f"{net}." not in routes
        )


def of_docker(network: dict) -> str:
    """Return this machine's address on Docker's bridge, as `docker network inspect bridge` tells it.

    An engine that has made the bridge itself at its start says no Gateway (docker.io 20.10.24 on a fresh Debian 12).
    """
    found = [
        one
        for one in network["IPAM"]["Config"] or []
        if ipaddress.ip_network(one["Subnet"]).version == 4
    ]
    if found and found[0].get("Gateway"):
        return found[0]["Gateway"]
    name = (network.get("Options") or {}).get("com.docker.network.bridge.name", "docker0")
    request, asked = 0x8915, struct.pack("256s", name.encode()[:15])  # SIOCGIFADDR: netdevice(7)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            return socket.inet_ntoa(fcntl.ioctl(any_socket, request, asked)[20:24])
    except OSError as error:
        if not found:
            raise ValueError(
                f"Docker's bridge: found no address of {name}: {error.strerror}"
            ) from error
        return str(next(ipaddress.ip_network(found[0]["Subnet"]).hosts()))


def possible() -> bool:
    """Return whether this user can make networks."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def remove(owner: str) -> int:
    """Remove an owner's namespaces, with all devices that end in them, and return how many that were."""
    if not possible():
        return 0
    found = [
        line.split()[0]
        for line in ip("netns", "list").splitlines()
        if line.startswith(f"{PREFIX}{owner[:8]}-")
    ]
    for space in found:
        ip("netns", "delete", space)
    return len(found)


def ip(*arguments: str) -> str:
    """Run iproute2's ip."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
