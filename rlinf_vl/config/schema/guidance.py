"""Keys of `algorithm.image_corruption`, `.papo` and `.distillation`: learning signals beside the
reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf_vl.config.schema.limits import NOT_NEGATIVE, SHARE, key

#: The value of `teacher_path` for a frozen copy of the policy, as it is at the run's start.
SELF = "self"


@dataclass
class ImageCorruptionConfig:
    share: float = key(0.0, SHARE)
    """NoisyRollout: share of each group's answers that are drawn on corrupted images; all are
    trained on with the clean ones. 0 is off, the paper takes 0.5. Their tokens have no engine's
    logprob on the clean image, so TIS leaves them alone."""
    strength: float = key(0.5, SHARE)
    """A diffusion's noise of strength × 1000 steps at the run's start; half of the strength is left
    after two thirds of the run, and none at its end."""


@dataclass
class PapoConfig:
    weight: float = key(0.0, NOT_NEGATIVE)
    """PAPO's γ, usually 0.01 to 0.02: weight of KL(policy‖policy on masked images), subtracted from
    the loss; 60 % of an image's squares of 14 pixels are black, others in each step. Costs a
    further pass. 0 is off."""
    entropy_weight: float = key(0.0, NOT_NEGATIVE)
    """PAPO's η, usually 0.03: weight of two entropies, the policy's and that on corrupted images,
    added to the loss. Above 0 the further pass has gradients, too."""


@dataclass
class DistillationConfig:
    teacher_path: str | None = None
    """A checkpoint with the policy's tokenizer and images, whose distribution the policy learns on
    its own answers. self: a frozen copy of the policy at the run's start, which sees
    privileged_template (OPSD). null is off."""
    privileged_template: str | None = None
    """A text that the teacher alone sees, at the end of the prompt. {answer} and the names of
    columns in braces stand for the row's values. null: it sees the policy's prompt."""
    teachers: dict[str, str] = field(default_factory=dict)
    """Several teachers, in place of teacher_path: a mapping from a row's label to the checkpoint
    that teaches this row, such as {charts: path/a, geometry: path/b}."""
    teacher_key: str | None = None
    """The column that has the label of each training row, for teachers."""
    weight: float = key(1.0, NOT_NEGATIVE)
    """Weight of the reverse KL, KL(policy‖teacher), of each token."""
    top_k: int = key(0, NOT_NEGATIVE)
    """0: the sampled token's log-ratio to the teacher is subtracted from its advantage. K > 0: the
    KL over the policy's K likeliest tokens and the rest as one is added to the loss; more exact,
    for a larger head."""
    reward_weight: float = key(1.0, NOT_NEGATIVE)
    """Factor of the reward's advantages; 0 learns from the teacher alone."""

    @property
    def labels_by_path(self) -> dict[str, tuple[str, ...]]:
        """Each teacher's checkpoint, and the labels of the rows that it teaches; none: all rows."""
        if self.teacher_path is not None:
            return {self.teacher_path: ()}
        labels: dict[str, tuple[str, ...]] = {}
        for label, path in self.teachers.items():
            labels[path] = (*labels.get(path, ()), label)
        return labels

    def label_of(self, row_labels: Mapping[str, str | float]) -> str | None:
        """Return the label of a row, of its short columns; None if the row has none."""
        label = None if self.teacher_key is None else row_labels.get(self.teacher_key)
        return None if label is None else str(label)

    def key_of(self, path: str) -> str:
        """Return the config key that names a teacher's checkpoint."""
        labels = self.labels_by_path[path]
        name = f"teachers.{labels[0]}" if labels else "teacher_path"
        return f"algorithm.distillation.{name}"
