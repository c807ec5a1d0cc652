"""The notebooks of examples/, run in kernels as a person runs them; and a run that is interrupted there."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples/notebooks"

pytestmark = pytest.mark.e2e


class Kernel:
    """A notebook and its kernel, in a folder of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        self.client = NotebookClient(
            self.book, timeout=600, resources={"metadata": {"path": str(folder)}}
        )

    def run(self, source: str) -> str:
        """What a cell of this source shows at its end."""
        cell = nbformat.v4.new_code_cell(source)
        self.book.cells.append(cell)
        self.client.execute_cell(cell, len(self.book.cells) - 1)
        return shown(cell)


def shown(cell) -> str:
    data = [output["data"] for output in cell.outputs if output.output_type == "execute_result"]
    return data[-1]["text/plain"] if data else ""


def warned(book) -> str:
    """What cells have printed or logged."""
    return "".join(
        output.text
        for cell in book.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream"
    )


def test_rows_and_a_reward_of_a_notebook_and_an_interrupt(tmp_path):
    kernel = Kernel("train", tmp_path)
    with kernel.client.setup_kernel():
        for number, cell in enumerate(list(kernel.book.cells)):
            kernel.client.execute_cell(cell, number)
        *_, trained, metrics, report, answers, path = (
            cell for cell in kernel.book.cells if cell.cell_type == "code"
        )
        assert "Run(folder=" in shown(trained)
        # The first one to need the toy's checkpoint shows how it is made, too.
        *_, bar = (output for output in trained.outputs if output.output_type == "display_data")
        assert "step 4/4 &nbsp; done<" in bar["data"]["text/html"]
        assert bar["data"]["text/html"].count("<tr>") == 5, "four steps and their head"
        assert "INFO" not in warned(kernel.book)
        folder = tmp_path / "results/notebook"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        assert all(
            row["reward/brief.letters"] > 1 and row["rollout/errors"] == 0 for row in rows[1:]
        )
        for row in rows[1:]:
            assert row["reward/mean"] == pytest.approx(
                row["reward/accuracy"] - 0.01 * row["reward/brief.letters"], abs=1e-6
            )
        assert (
            "val/accuracy" in shown(metrics) and (folder / "report.html").stat().st_size > 100_000
        )
        assert shown(answers).count("\\\\boxed") + shown(answers).count("'") >= 4
        assert (
            folder / "models/global_step_4/model.safetensors"
        ).is_file() and "global_step_4" in shown(path)

        with pytest.raises(CellExecutionError) as mistake:
            kernel.run("rlinf_vl.train('toy-grpo-cpu', {'runner.max_step': 3})")
        assert "did you mean 'runner.max_steps'" in str(mistake.value) and "api.py" not in str(
            mistake.value
        )

        # Interrupted as Jupyter does it: SIGINT to the kernel's process group. Ray is up, and answers the next run as well.
        pid, address = (
            kernel.run("import os, ray\n(os.getpid(), ray.get_runtime_context().gcs_address)")
            .strip("()")
            .split(", ")
        )
        lines = tmp_path / "results/long/metrics.jsonl"

        def interrupt():
            deadline = time.monotonic() + 500
            while time.monotonic() < deadline and not (
                lines.exists() and '"step": 1,' in lines.read_text()
            ):
                time.sleep(0.05)
            os.killpg(os.getpgid(int(pid)), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        more = '{"runner.experiment_name": "long", "runner.max_steps": 500, "runner.val_check_interval": -1}'
        said = kernel.run(
            f"long = rlinf_vl.train('toy-grpo-cpu', {more}, reward=brief, train_dataset=rows)\nlong.state"
        )
        assert said == "'stopped'"
        step = json.loads(lines.read_text().splitlines()[-1])["step"]
        assert [path.name for path in (tmp_path / "results/long/checkpoints").iterdir()] == [
            f"global_step_{step}"
        ]
        assert kernel.run("ray.get_runtime_context().gcs_address") == address
        assert kernel.run("1 + 1") == "2"


@pytest.mark.nightly
def test_an_environment_of_a_notebook(tmp_path):
    kernel = Kernel("environment", tmp_path)
    kernel.client.execute()
    rows = [
        json.loads(line)
        for line in (tmp_path / "results/second-chance/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(1 < row["env/tries"] <= 2 and row["rollout/errors"] == 0 for row in rows)
    events = [
        json.loads(line)
        for line in (tmp_path / "results/second-chance/events.jsonl").read_text().splitlines()
    ]
    assert {"resumed", "config_changed"} <= {event["kind"] for event in events}
