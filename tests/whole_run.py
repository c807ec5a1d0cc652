"""What the tests of whole runs share: the fixed metrics, and finding every process of a run."""

import psutil

FIXED_METRICS = {
    "reward/mean", "reward/std", "reward/zero_std_groups", "actor/loss", "actor/grad_norm", "actor/entropy",
    "actor/clip_fraction", "actor/rollout_train_kl", "actor/rollout_train_k3", "actor/rollout_train_abs_diff_mean",
    "actor/rollout_train_abs_diff_max", "actor/tis_mean", "actor/tis_clip_fraction", "actor/tis_ess",
    "rollout/response_length_mean", "rollout/response_length_max", "rollout/truncated", "rollout/tokens_per_second",
    "actor/tokens_per_second", "packing/fill", "data/object_store_bytes", "data/unique_bytes", "time/step",
    "time/generate", "time/train", "time/sync",
}  # fmt: skip


def marked(mark: dict[str, str]) -> list[psutil.Process]:
    """Processes whose environment carries the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
