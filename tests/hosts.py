"""Hosts on one machine: network namespaces with addresses, shared memory, Ray folders and processes of their own, on a switch."""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
OURS = (  # settings of the scripts that this session's environment must not bring in
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "RAY_HEAD_FILE", "RAY_PORT", "RAY_INTERFACE", "RAY_NODE_IP", "RAY_ADDRESS",
    "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
)  # fmt: skip
#: Runs a command whose /dev/shm is the folder $0.
WITH_SHM = 'mount --bind "$0" /dev/shm && exec "$@"'
#: Making hosts takes root, and `ip` of iproute2.
POSSIBLE = os.geteuid() == 0 and shutil.which("ip") is not None
_CALLS = itertools.count()


@dataclass(frozen=True)
class Host:
    """A network namespace with one address, a Ray folder and a home of its own; `cpus` slots."""

    rank: int
    of: int  #: hosts
    namespace: str
    interface: str
    ip: str
    folder: Path
    cpus: int

    def popen(
        self, *command: str, output: int = subprocess.PIPE, **settings: str
    ) -> subprocess.Popen:
        environment = {name: value for name, value in os.environ.items() if name not in OURS}
        environment |= {"RLINF_VL_PYTHON": sys.executable, "RAY_WAIT_TIMEOUT": "60"}
        environment |= {
            "RAY_TMPDIR": str(self.folder),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.of),
            **settings,
        }
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "sh", "-c", WITH_SHM, str(self.shm), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def shm(self) -> Path:
        """What its processes know as /dev/shm."""
        return self.folder / "shm"

    def run(self, *command: str, expect: int = 0, within: float = 300, **settings: str) -> str:
        """What a command says, whose exit code must be `expect`."""
        return finish(self.popen(*command, **settings), expect, within)

    def start(self, **settings: str) -> str:
        return self.run(*self.starting(), **settings)

    def starting(self) -> list[str]:
        return script(
            "start_ray.sh",
            f"--num-cpus={self.cpus}",
            "--num-gpus=1",
            "--object-store-memory=200000000",
        )

    def processes(self) -> list[psutil.Process]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        processes = []
        for pid in listed.stdout.split():
            with suppress(psutil.NoSuchProcess):  # it has ended since
                processes.append(psutil.Process(int(pid)))
        return processes

    def actors(self) -> set[tuple[str, int]]:
        """Class and process id of the Ray actors that run here.

        A process that an actor starts has its title until it begins its own program, and is none."""
        titles = {}
        for process in self.processes():
            try:
                title = process.cmdline()[0].partition("ray::")[2].partition(".")[0]
                titles[process.pid] = title, process.ppid()
            except (psutil.Error, IndexError):
                continue
        return {
            (title, pid)
            for pid, (title, parent) in titles.items()
            if title in ("ActorRank", "RolloutRank") and titles.get(parent, ("", 0))[0] != title
        }

    def plug(self, *, in_: bool) -> None:
        """Pull this host's cable out of the switch, or put it back: packets are lost without a word to either end."""
        _ip("link", "set", f"{self.interface}s", "up" if in_ else "down")


def script(name: str, *arguments: str) -> list[str]:
    return ["bash", str(ROOT / "ray_utils" / name), *arguments]


def finish(process: subprocess.Popen, expect: int = 0, within: float = 300) -> str:
    try:
        output, _ = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == expect, output
    return output


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def hosts_with(cpus: list[int]) -> Iterator[list[Host]]:
    """Hosts with so many CPU slots each, joined by a switch; at the end their processes are killed.

    Their addresses go by this process and call: `ray start` refuses one that another Ray of this machine has, in whatever namespace.

    Raises:
        OSError: there can be no network namespaces here.
    """
    here = os.getpid() % 10**6
    # No two sessions whose process ids are near have the same, as they would by the last digits only.
    block = (here // 250 + 17 * next(_CALLS)) % 50
    switch, subnet = f"rv{here}", f"10.{200 + block}.{here % 250}"
    folder = Path(tempfile.mkdtemp(prefix=f"rc{here}-"))  # short: the paths of sockets are bounded
    hosts = [
        Host(
            i,
            len(cpus),
            f"rlinf{here}{c}",
            f"rv{here}{c}",
            f"{subnet}.{i + 1}",
            folder / c,
            cpus[i],
        )
        for i, c in enumerate("abcdef"[: len(cpus)])
    ]
    try:
        try:
            _ip("link", "add", switch, "type", "bridge")
            _ip("link", "set", switch, "up")
            for host in hosts:
                host.shm.mkdir(parents=True)
                subprocess.run(
                    ["mount", "-t", "tmpfs", "tmpfs", host.shm],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                _ip("netns", "add", host.namespace)
                _ip("link", "add", f"{host.interface}s", "type", "veth",
                    "peer", "name", host.interface, "netns", host.namespace)  # fmt: skip
                _ip("link", "set", f"{host.interface}s", "master", switch, "up")
                _ip("-n", host.namespace, "addr", "add", f"{host.ip}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    _ip("-n", host.namespace, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            raise OSError(f"no network namespaces here: {error.stderr.strip()}") from error
        yield hosts
    finally:
        for host in hosts:
            if host.namespace in os.listdir("/run/netns"):
                for process in host.processes():
                    process.kill()
                _ip("netns", "del", host.namespace)
            subprocess.run(["umount", "-l", host.shm], capture_output=True)
            # The namespace takes its end of the cable along, but not before its last socket has lingered.
            subprocess.run(["ip", "link", "del", f"{host.interface}s"], capture_output=True)
        subprocess.run(["ip", "link", "del", switch], capture_output=True)
        shutil.rmtree(folder)
