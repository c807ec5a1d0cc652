"""SGLang's scheduler on a CPU: forward passes by the interval between prefills, and the processor time of an idle engine.

    python benchmarks/sglang_schedule.py [--groups 24] [--out FILE]

Each line is an engine of its own, on the toy with random weights: groups of samples are submitted at once, more than it decodes at a
time. Passes are counted from SGLang's log, so the machine's speed does not matter. Then the engine is left alone for five seconds.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SLOTS = 16
SAMPLES = 4
IDLE_S = 5.0
#: Name → server arguments in place of those that are chosen.
CASES = {
    "ours": {},
    "SGLang's for Qwen3-VL on large Hopper GPUs": {"prefill_decode_interval_min_bs": 0},
    "SGLang's elsewhere, and polling": {"prefill_decode_interval": 0, "sleep_on_idle": False},
}


def run_case(arguments: dict, groups: int) -> None:
    """Answer the groups with one engine; print its idle processor time as the last line."""
    import psutil
    from sglang_toy import Toy, engine_of

    toy = Toy(Path(tempfile.mkdtemp()) / "toy")
    logged = {"log_level": "info", "decode_log_interval": 1} | arguments
    engine = engine_of(toy, max_running=SLOTS, extra_arguments=logged)
    lengths = (24, 48, 96)
    requests = [
        toy.request(1, SAMPLES, seed=i, max_new_tokens=lengths[i % 3], stop_ids=())
        for i in range(groups)
    ]
    print("--- rollout", flush=True)
    engine.generate(requests)
    print("--- idle", flush=True)
    processes = [psutil.Process(pid) for pid in engine.host.processes.pids]

    def processor_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    start = processor_s()
    time.sleep(IDLE_S)
    print("idle", processor_s() - start, flush=True)
    engine.close()


def figures(text: str) -> dict[str, float]:
    """Return the figures in a case's output."""
    rollout, idle = text.split("--- rollout")[1].split("--- idle")
    decoding = [int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", rollout)]
    return {
        "prefills": len(re.findall(r"Prefill batch", rollout)),
        "decoding_steps": len(decoding),
        "mean_running": sum(decoding) / max(1, len(decoding)),
        "idle_processor_share": float(re.findall(r"idle ([\d.]+)", idle)[-1]) / IDLE_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        run_case(json.loads(arguments.case), arguments.groups)
        return
    results = {}
    for name, case in CASES.items():
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        command += ["--groups", str(arguments.groups)]
        done = subprocess.run(
            command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        results[name] = figures(done.stdout)
        print(name, results[name], flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
