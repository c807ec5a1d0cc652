"""The vision controls of a validation: which rows have them, their tasks, their results."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlinf_vl.config.schema import Config
from rlinf_vl.controller.protocols import Pool
from rlinf_vl.data.dataset import FilterResult
from rlinf_vl.data.vision_controls import VisionControl, choose_donors
from rlinf_vl.errors import ConfigError
from rlinf_vl.rollout.submission import Submission, Task
from rlinf_vl.types import GroupSummary

log = logging.getLogger(__name__)

#: Kind of control → row → its control.
Controls = Mapping[str, Mapping[int, VisionControl]]


def plan_controls(config: Config, rows: FilterResult) -> dict[str, dict[int, VisionControl]]:
    """Return the controls of data.vision_controls for each usable validation row with an image.

    Raises:
        ConfigError: no row has an image.
    """
    data, seed = config.data, config.runner.seed
    if not data.vision_controls:
        return {}
    images = {row: rows.facts[row].images for row in rows.kept if rows.facts[row].images}
    if not images:
        raise ConfigError(
            f"data.vision_controls: {data.vision_controls}, and none of the {len(rows.kept)} rows "
            "of data.val_data_paths has an image; images that an environment draws itself can't be "
            "replaced. Leave the key out, or validate on rows with images"
        )
    if without := len(rows.kept) - len(images):
        log.info("data.vision_controls: %d validation rows without an image have none", without)
    controls: dict[str, dict[int, VisionControl]] = {}
    for kind in data.vision_controls:
        control = VisionControl(kind, seed)
        controls[kind] = dict.fromkeys(images, control)
    if "swapped" in controls:
        donors = choose_donors(images, seed)
        controls["swapped"] = {
            row: VisionControl("swapped", seed, donors=of_row)
            for row, of_row in donors.by_row.items()
        }
        if donors.resized:
            log.warning(
                "data.vision_controls: swapped: no other image has the size of %d of %d rows' "
                "images; another one is resized to it",
                donors.resized,
                len(images),
            )
        if lonely := len(images) - len(donors.by_row):
            log.warning(
                "data.vision_controls: swapped: %d rows have no other image to be asked about, "
                "and are left out of it",
                lonely,
            )
    return controls


def control_tasks(tasks: Sequence[Task], controls: Controls) -> dict[str, list[Task]]:
    """Return the tasks once more for each control, with the same random streams."""
    by_kind: dict[str, list[Task]] = {}
    for kind, by_row in controls.items():
        by_kind[kind] = [
            replace(
                task,
                group_id=f"{kind}-{task.group_id}",
                control=by_row[task.row],
                summary_only=True,
            )
            for task in tasks
            if task.row in by_row
        ]
    return by_kind


class ControlRun:
    """The controls of one validation, being answered."""

    def __init__(self, pool: Pool, tasks: Sequence[Task], controls: Controls) -> None:
        """Submit the controls of these tasks."""
        self.tasks = control_tasks(tasks, controls)
        all_tasks = [task for of_kind in self.tasks.values() for task in of_kind]
        self._submission: Submission | None = pool.submit(all_tasks) if all_tasks else None

    def results(self) -> dict[str, dict[int, GroupSummary]]:
        """Wait for the answers; return kind → row → summary."""
        summaries: dict[str, GroupSummary] = {}
        if self._submission is not None:
            arrived = self._submission.results()
            summaries = {summary.id: summary for summary, _ in arrived}
        by_kind: dict[str, dict[int, GroupSummary]] = {}
        for kind, tasks in self.tasks.items():
            by_kind[kind] = {task.row: summaries[task.group_id] for task in tasks}
        return by_kind

    def close(self) -> None:
        """Abandon what is not answered."""
        if self._submission is not None:
            self._submission.close()
