"""A toy run on three hosts that are struck at random, against one that is left alone.

    python benchmarks/chaos.py [--minutes 30] [--seed 1] [--steps N] [--every 30 60] [--kinds kill stop …] [--json FILE]
                               [--hard] [--config toy-grpo-cpu-sglang]

With --hard the schedule is async, weights travel as changes (delta), a worker takes 30 s to be made, twice as long as a
heartbeat may, and 3 % of the environments never return from close(): see benchmarks/awkward_env.py. A start then takes longer
than the time between two strikes, so there is a strike only when a step was done since the last one (--paced).

The hosts are network namespaces on this machine, so it takes root: the head with the controller and an actor rank, one with
an actor rank and a rollout worker, one with a rollout worker. Every 30 to 60 seconds one of these happens, drawn from the seed:

| kind | what |
|---|---|
| kill | kill -9 of a process of the run (a rank, a worker, the writer, a grader), or three times in ten of Ray, the head's too |
| stop | SIGSTOP of a rank, a worker or the writer, for good |
| pause | SIGSTOP of Ray's own process on a host, 20 seconds long |
| cut | a host's cable is out for 20 seconds, the head's too |
| disk | the disk with the run's folder is full for 10 seconds |
| node | kill -9 of everything on a host that is not the head |

and kill -9 of the controller after each quarter of the steps. What an operator's tools would do is done as they do it: nodes
that ended are started again by ray_utils/start_ray.sh, a run that ended is started again with runner.resume_dir=auto.

It fails unless the run comes to its last step; its accuracy is that of the undisturbed one within four standard errors; its
ledger and metrics have every step once, every group once, and no row twice in an epoch; and no process, shared memory or
half-written checkpoint is left. Where the schedule is sync the ledger has the undisturbed run's rows, step by step; async, which
groups a step gets depends on time, so groups and rows are only compared with each other.
"""

import argparse
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from hosts import Host, hosts_with, script  # noqa: E402
from whole_run import rows_of  # noqa: E402

#: What --hard adds to both runs.
HARD = (
    "runner.schedule=async",
    "rollout.weight_sync=delta",
    f"rollout.env_class={ROOT / 'benchmarks/awkward_env.py'}:AwkwardEnv",
    "rollout.turn_timeout=20",
)
KINDS = ("kill", "stop", "pause", "cut", "disk", "node")
#: Titles of the run's Ray actors, as processes show them.
ACTORS = ("ray::ActorRank", "ray::RolloutRank", "ray::TrajectoryWriter")
CUT_S, FULL_S = 20, 10
#: Seconds between two looks at whether a host's node must be started again.
KEEP_S = 5
#: Controllers killed.
CONTROLLERS = 3
DISK_MB = 400


def title(process: psutil.Process) -> str:
    """A process's title, else its name and what it runs."""
    with suppress(psutil.Error):
        line = process.cmdline()
        return (
            line[0]
            if line and line[0].startswith("ray::")
            else " ".join([process.name(), *line[1:4]])[:80]
        )
    return ""


@dataclass
class Cluster:
    """Ray on every host; nodes that end are started again while it is `kept`."""

    hosts: list[Host]
    head_file: str
    kept: threading.Event = field(default_factory=threading.Event)
    restarts: Counter = field(default_factory=Counter)

    def up(self, host: Host) -> bool:
        names = ["gcs_server", "raylet"] if host.rank == 0 else ["raylet"]
        found = [
            p.name()
            for p in host.processes()
            if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]
        return all(name in found for name in names)

    def start(self, host: Host, wait: str = "60") -> bool:
        try:
            lean = [] if host.rank else ["--include-dashboard=false"]
            host.run(*host.starting(), *lean, RAY_HEAD_FILE=self.head_file, RAY_WAIT_TIMEOUT=wait)
            return True
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(f"    {host.ip} does not start: {str(error).strip()[-300:]}", flush=True)
            return False

    def keep(self) -> None:
        """Start nodes that have ended. Without the head the others are of no use: all start again."""
        while not self.kept.wait(KEEP_S):
            with suppress(psutil.Error):
                down = [host for host in self.hosts if not self.up(host)]
                if self.hosts[0] in down:
                    self.stop()
                    down = self.hosts
                for host in down:
                    self.restarts[host.rank] += 1
                    self.start(host, "20")

    def stop(self) -> None:
        for host in reversed(self.hosts):
            with suppress(subprocess.TimeoutExpired, AssertionError):
                host.run(*script("stop_ray.sh"))


class Run:
    """The run on the head's host, started again whenever it ends before its last step."""

    def __init__(self, cluster: Cluster, folder: Path, log: Path, args: argparse.Namespace) -> None:
        self.cluster, self.folder, self.steps = cluster, folder / args.config, args.steps
        self.command = [
            *("bash", str(ROOT / "examples/reasoning/run_main_grpo_vqa.sh"), args.config),
            *(
                f"runner.output_dir={folder}",
                f"runner.max_steps={args.steps}",
                "runner.resume_dir=auto",
            ),
            *("cluster.num_nodes=3", "cluster.component_placement={actor: 0-1, rollout: 2-3}"),
            *(
                "runner.save_interval=20",
                "runner.val_check_interval=100",
                "runner.heartbeat_timeout=15",
            ),
            *(HARD if args.hard else ()),
            *args.overrides,
        ]
        self.log = log.open("a")
        self.starts = 0
        self.codes: list[int] = []
        self.process: subprocess.Popen | None = None

    def begin(self) -> None:
        self.starts += 1
        self.process = self.cluster.hosts[0].popen(*self.command, output=self.log.fileno())

    def ended(self) -> bool:
        """Whether it has come to its end; one that ended before is started again once the cluster is whole."""
        if self.process is not None:
            if (code := self.process.poll()) is None:
                return False
            self.codes.append(code)
            self.process = None
            print(f"    the run ended with exit code {code} in step {self.step}", flush=True)
            if code == 0:
                return True
        with suppress(psutil.Error):
            if all(map(self.cluster.up, self.cluster.hosts)):
                self.begin()
        return False

    @property
    def step(self) -> int:
        rows = rows_of(self.folder / "metrics.jsonl")
        return rows[-1]["step"] if rows else -1

    def controller(self) -> psutil.Process | None:
        """The controller's process, once it trains."""
        for process in self.cluster.hosts[0].processes():
            with suppress(psutil.Error):
                if "rlinf_vl" in process.cmdline() and "train" in process.cmdline():
                    return process
        return None


class Striker:
    """Draws strikes from a seed, and carries them out."""

    def __init__(self, run: Run, disk: Path, seed: int, kinds: list[str]) -> None:
        self.run, self.where, self.kinds = run, disk, kinds
        self.hosts = run.cluster.hosts
        self.random = random.Random(seed)
        self.done: list[dict] = []

    def strike(self, kind: str | None = None) -> None:
        kind = kind or self.random.choice(self.kinds)
        step = self.run.step
        began = time.monotonic()
        what = getattr(self, kind)()
        self.done.append({"kind": kind, "what": what, "step": step})
        print(
            f"{time.strftime('%H:%M:%S')} step {step}: {kind} {what} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )

    def _processes(
        self, titles: tuple[str, ...] = (), *, of_ray: bool
    ) -> list[tuple[Host, psutil.Process, str]]:
        """Processes that may be struck: all but the controller, those of Ray only with `of_ray`."""
        found = []
        controller = self.run.controller()
        for host in self.hosts:
            for process in host.processes():
                name = title(process)
                if not name or process == controller or (titles and not name.startswith(titles)):
                    continue
                if of_ray or name.startswith(ACTORS) or self._inside(process):
                    found.append((host, process, name))
        return found

    @staticmethod
    def _inside(process: psutil.Process) -> bool:
        """Whether a process is a child of one of the run's actors."""
        with suppress(psutil.Error):
            return any(title(parent).startswith(ACTORS) for parent in process.parents())
        return False

    def _signal(self, number: signal.Signals, found: list[tuple[Host, psutil.Process, str]]) -> str:
        if not found:
            return "nobody there"
        host, process, name = self.random.choice(
            sorted(found, key=lambda item: (item[0].rank, item[2]))
        )
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        return f"{name} on {host.ip}"

    def kill(self) -> str:
        return self._signal(signal.SIGKILL, self._processes(of_ray=self.random.random() < 0.3))

    def stop(self) -> str:
        return self._signal(signal.SIGSTOP, self._processes(ACTORS, of_ray=False))

    def pause(self) -> str:
        host = self.random.choice(self.hosts)
        found = [
            process
            for process in host.processes()
            if title(process).startswith(("raylet", "gcs_server"))
        ]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(CUT_S)
        return f"Ray on {host.ip}"

    def cut(self) -> str:
        host = self.random.choice(self.hosts)
        host.plug(in_=False)
        time.sleep(CUT_S)
        host.plug(in_=True)
        return host.ip

    def disk(self) -> str:
        ballast = self.where / "ballast"
        with ballast.open("wb") as file, suppress(OSError):
            while True:
                file.write(bytes(2**20))
                file.flush()
        time.sleep(FULL_S)
        ballast.unlink()
        return "full"

    def node(self) -> str:
        host = self.random.choice(self.hosts[1:])
        for process in host.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return host.ip

    def controller(self) -> str:
        process = self.run.controller()
        if process is None:
            return "nobody there"
        with suppress(psutil.NoSuchProcess):
            process.kill()
        return f"process {process.pid}"


def undisturbed(cluster: Cluster, folder: Path, args: argparse.Namespace) -> tuple[Path, float]:
    """A run to which nothing happens: its folder and its seconds."""
    began = time.monotonic()
    run = Run(cluster, folder, folder / "log.txt", args)
    if run.step == args.steps:  # it was made before, in the same --folder
        return run.folder, 0.0
    run.begin()
    while not run.ended():
        time.sleep(0.5)
        if len(run.codes) > 0:
            sys.exit(f"the undisturbed run failed; see {folder / 'log.txt'}")
    return run.folder, time.monotonic() - began


def struck(cluster: Cluster, folder: Path, args: argparse.Namespace) -> tuple[Run, Striker]:
    """The run that is struck until `args.minutes` have passed, and then left to end."""
    run = Run(cluster, folder, folder.parent / "struck.txt", args)
    run.begin()
    striker = Striker(run, folder, args.seed, args.kinds)
    end = time.monotonic() + 60 * args.minutes
    killed, stepped = 0, run.step  # controllers; the step at the last strike
    due = time.monotonic() + striker.random.uniform(*args.every)
    deadline = end + 60 * max(30, args.minutes)  # a busy machine takes minutes for each start
    while not run.ended() and time.monotonic() < deadline:
        trains = run.process is not None and run.step > stepped
        if (
            killed < CONTROLLERS
            and trains
            and run.step >= (killed + 1) * args.steps // (CONTROLLERS + 1)
        ):
            striker.strike("controller")
            killed, stepped = killed + 1, run.step
        elif due < time.monotonic() < end and (trains or not args.paced):
            striker.strike()
            stepped = run.step
            due = time.monotonic() + striker.random.uniform(*args.every)
        time.sleep(0.5)
    return run, striker


def row_of_group(ledger: list[dict]) -> dict[str, object]:
    """Return the row of data that each group in a ledger answers."""
    return {
        name: row for line in ledger for name, row in zip(line["groups"], line["rows"], strict=True)
    }


def problems_of(
    folder: Path, reference: Path, steps: int, groups: int, *, in_order: bool
) -> tuple[list[str], dict]:
    """Return what is wrong with the run's files, and figures.

    Args:
        groups: those of a step.
        in_order: each step has the undisturbed run's rows; otherwise each group has the row that it has there.
    """
    wrong = []
    metrics, ledger = rows_of(folder / "metrics.jsonl"), rows_of(folder / "ledger.jsonl")
    if [row["step"] for row in metrics] != list(range(steps + 1)):
        wrong.append(f"metrics.jsonl does not have every step once: it has {len(metrics)} lines")
    if [row["step"] for row in ledger] != list(range(1, steps + 1)):
        wrong.append(f"ledger.jsonl does not have every step once: it has {len(ledger)} lines")
    names = [name for row in ledger for name in row["groups"]]
    undisturbed_ledger = rows_of(reference / "ledger.jsonl")
    expected_names = [f"train-{step}-{k}" for step in range(1, steps + 1) for k in range(groups)]
    if not in_order:  # the first step asks for more groups than it trains on
        expected_names = [name for row in undisturbed_ledger for name in row["groups"]]
    if len(set(names)) != steps * groups or sorted(names) != sorted(expected_names):
        wrong.append(
            f"ledger.jsonl does not have every group once: {len(set(names))} of {steps * groups}"
        )
    if in_order:
        same_rows = [row["rows"] for row in ledger] == [row["rows"] for row in undisturbed_ledger]
    else:
        same_rows = row_of_group(ledger) == row_of_group(undisturbed_ledger)
    if not same_rows:
        wrong.append("ledger.jsonl has other rows than the undisturbed run's")
    last, other = (
        rows[-1] if rows else {} for rows in (metrics, rows_of(reference / "metrics.jsonl"))
    )
    found, expected = last.get("val/accuracy", math.nan), other["val/accuracy"]
    noise = math.sqrt(2 * max(0.01, expected * (1 - expected)) / other["val/problems"])
    if not abs(found - expected) <= 4 * noise:
        wrong.append(
            f"val/accuracy is {found:.3f}, the undisturbed run's {expected:.3f}, the noise {noise:.3f}"
        )
    left = [str(path) for path in (folder / "checkpoints").glob(".*")]
    if left:
        wrong.append(f"half-written checkpoints: {left}")
    counts = Counter(row["kind"] for row in rows_of(folder / "events.jsonl"))
    figures = {"accuracy": found, "undisturbed_accuracy": expected, "noise": noise}
    return wrong, figures | {f"events_{kind}": n for kind, n in sorted(counts.items())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30, help="how long there are strikes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="training steps (default: 50 a minute)")
    parser.add_argument(
        "--every", type=float, nargs=2, default=[30, 60], help="seconds between strikes"
    )
    parser.add_argument(
        "--paced",
        action="store_true",
        help="strike only when a step was done since the last strike",
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--config", default="toy-grpo-cpu", help="an example's name")
    parser.add_argument(
        "--hard",
        action="store_true",
        help="async, delta, slow constructors, environments that never close; --paced",
    )
    parser.add_argument(
        "--folder", type=Path, help="where the runs are kept, and an undisturbed one is found again"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="config overrides of both runs")
    args = parser.parse_args()
    # So that everything is taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.steps = args.steps or int(50 * args.minutes)
    args.paced |= args.hard

    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos"))
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    (folder / "undisturbed").mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", disk], check=True)
    try:
        with hosts_with([1, 2, 1]) as hosts:
            cluster = Cluster(hosts, str(hosts[0].folder / "shared/head"))
            if not all(map(cluster.start, hosts)):
                sys.exit("the cluster does not start")
            reference, seconds = undisturbed(cluster, folder / "undisturbed", args)
            print(f"undisturbed: {args.steps} steps in {seconds:.0f} s", flush=True)
            keeper = threading.Thread(target=cluster.keep, daemon=True)
            keeper.start()
            began = time.monotonic()
            run, striker = struck(cluster, disk, args)
            wrong, figures = problems_of(
                run.folder, reference, args.steps, 16, in_order=not args.hard
            )
            if not run.codes or run.codes[-1] != 0:
                wrong.insert(0, f"the run did not come to its end: step {run.step} of {args.steps}")
            figures |= {"seed": args.seed, "steps": args.steps, "seconds": time.monotonic() - began}
            figures |= {
                "undisturbed_seconds": seconds,
                "strikes": len(striker.done),
                "starts": run.starts,
            }
            figures |= {
                f"strikes_{kind}": n for kind, n in Counter(s["kind"] for s in striker.done).items()
            }
            figures |= {"node_restarts": cluster.restarts.total()}
            cluster.kept.set()
            keeper.join()
            cluster.stop()
            left = [title(process) for host in hosts for process in host.processes()]
            if left:
                wrong.append(f"processes are left: {left}")
            if leaked := [path.name for host in hosts for path in host.shm.iterdir()]:
                wrong.append(f"shared memory is left: {leaked}")
        for name in ("metrics.jsonl", "ledger.jsonl", "events.jsonl"):
            with suppress(OSError):
                shutil.copy2(run.folder / name, folder)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures | {"wrong": "; ".join(wrong)}, indent=1) + "\n")
    if not args.folder and not wrong:
        shutil.rmtree(folder)
    if wrong:
        sys.exit("\n".join(["", *wrong, f"see {folder}"]))
    print("every step once, every group once, accuracy within noise, nothing left")


if __name__ == "__main__":
    main()
