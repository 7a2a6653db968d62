"""Hosts on one machine: network, mount and hostname namespaces, connected by a bridge.

:func:`enter` runs the calling program again in new namespaces, as their root and without privileges
outside.  When that program ends, the kernel kills all its processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

#: The address of the services in the network of namespaces.
_GATEWAY = "10.77.0.1"
_ENTERED = "BROADWAY_CLUSTER_ENTERED"
_UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--uts", "--pid"),
    *("--fork", "--kill-child", "--mount-proc"),
)


class HostMissing(RuntimeError):
    """A host cannot be created."""


def enter() -> Network:
    """Runs this program again in new namespaces, unless it already runs in them.

    If the machine does not support namespaces, hosts are processes with separate folders.
    """
    if os.environ.get(_ENTERED):
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "cluster", "type", "bridge")
        _run("ip", "addr", "add", f"{_GATEWAY}/24", "dev", "cluster")
        _run("ip", "link", "set", "cluster", "up")
        return Network(_GATEWAY, NamespaceHost)
    reason = _namespaces_error()
    if not reason:
        os.environ[_ENTERED] = "1"
        os.execvp(_UNSHARE[0], [*_UNSHARE, sys.executable, *sys.orig_argv[1:]])
    print(
        "Hosts are processes with a separate HOME, working directory and AIRFLOW_HOME on one"
        f" network: namespaces cannot be created here ({reason}).",
        file=sys.stderr,
    )
    return Network("127.0.0.1", Host)


def _namespaces_error() -> str:
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"the program {program} of util-linux or iproute2 is missing"
    command = [*_UNSHARE, "ip", "link", "add", "a0", "type", "veth", "peer", "name", "b0"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()


class Host:
    """A host: a name, an address, and a disk with home, temporary files and logs.

    :param number: The last part of its address, from 2.
    :param folder: The folder of its disk.
    :param shared: A folder of the checkout that hosts must not share.
    """

    #: Whether the host can be disconnected.
    is_separate = False

    def __init__(self, name: str, number: int, folder: Path, shared: Path) -> None:
        self.name, self.folder = name, folder
        self.address = "127.0.0.1"
        #: The disk's path on this host.
        self.disk = folder
        for part in ("home", "tmp", "work"):
            (folder / part).mkdir(parents=True)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Process:
        """Starts a command on this host; its output goes to ``<name>.log`` in :attr:`folder`."""
        own = {"HOME": str(self.disk / "home"), "TMPDIR": str(self.disk / "tmp")}
        own |= {"AIRFLOW_HOME": str(self.disk / "airflow"), "CLUSTER_HOST": self.name}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                self._command(command),
                env={**env, **own},
                cwd=self.folder / "work",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> str:
        """Runs a command on this host; returns its output."""
        return subprocess.run(
            self._command(command), env=env, check=True, capture_output=True, text=True
        ).stdout

    def _command(self, command: Sequence[str]) -> list[str]:
        return list(command)


class NamespaceHost(Host):
    """A host with separate network, mount and hostname namespaces; ``shared`` is its disk."""

    is_separate = True

    def __init__(self, name: str, number: int, folder: Path, shared: Path) -> None:
        super().__init__(name, number, folder, shared)
        self.address, self.disk = f"10.77.0.{number}", shared
        unshare = ["unshare", "--net", "--mount", "--uts", "sleep", "infinity"]
        self._holder = subprocess.Popen(unshare)
        self._await_namespaces()
        link = f"host{number}"
        peer = ("peer", "name", "eth0", "netns", str(self._holder.pid))
        _run("ip", "link", "add", link, "type", "veth", *peer)
        _run("ip", "link", "set", link, "master", "cluster", "up")
        script = (
            f"hostname {name} && ip link set lo up && ip addr add {self.address}/24 dev eth0"
            f" && ip link set eth0 up && mount --bind {folder.parent / 'hosts'} /etc/hosts"
            f" && mount --bind {folder} {shared} && mount -t tmpfs tmpfs /dev/shm"
        )
        _run(*self._inside, "sh", "-c", script)

    def disconnect(self) -> None:
        """Disconnects the host from the network; its processes keep running."""
        _run(*self._inside, "ip", "link", "set", "eth0", "down")

    def connect(self) -> None:
        """Reconnects the host to the network."""
        _run(*self._inside, "ip", "link", "set", "eth0", "up")

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", "--uts", "--"]

    def _command(self, command: Sequence[str]) -> list[str]:
        return [*self._inside, "env", "-C", str(self.disk / "work"), *command]

    def _await_namespaces(self) -> None:
        own = os.readlink("/proc/self/ns/uts")
        end = time.monotonic() + 10
        while os.readlink(f"/proc/{self._holder.pid}/ns/uts") == own:
            if time.monotonic() > end:
                raise HostMissing(f"the host {self.name} did not start within 10 s")
            time.sleep(0.02)


class Network(NamedTuple):
    """The type of the hosts, and the address of the services.

    :param gateway: The address of the services.
    """

    gateway: str
    kind: type[Host]

    def make_hosts(self, names: Sequence[str], folder: Path, shared: Path) -> dict[str, Host]:
        """Creates hosts with their disks below ``folder``."""
        lines = ["127.0.0.1 localhost", f"{self.gateway} services"]
        lines += [f"10.77.0.{number} {name}" for number, name in enumerate(names, 2)]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        return {
            name: self.kind(name, number, folder / name, shared)
            for number, name in enumerate(names, 2)
        }


def hostname() -> str:
    """Returns the name of the host on which this process runs; Airflow's ``hostname_callable``."""
    return os.environ.get("CLUSTER_HOST", "services")


Process = subprocess.Popen[bytes]


def kill_tree(process: Process) -> None:
    """Kills a process and its descendants with SIGKILL, like a power failure."""
    with_children = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
    for victim in with_children:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostMissing(f"{' '.join(command)}: {done.stderr.strip()}")
