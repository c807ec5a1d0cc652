"""A replay's outcome as a table for people and as JSON."""

from typing import Any

import numpy as np

from rlinf_vl.config.schema import Config
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.verify.replay.compare import Agreement
from rlinf_vl.tools.verify.replay.hooks import pixel_digest
from rlinf_vl.tools.verify.replay.quantities import Quantity
from rlinf_vl.tools.verify.replay.reasons import reasons_for, sides_text
from rlinf_vl.tools.verify.replay.run import Outcome
from rlinf_vl.tools.verify.replay.subject import Subject


def size_text(step: RecordedStep) -> str:
    """Return how large a step is, in words."""
    sequences = [sequence for group in step.groups for sequence in group.sequences]
    images = {image.hash for group in step.groups for image, _ in group.images}
    longest = max((int(s.loss_mask.sum()) for s in sequences), default=0)
    counts = [
        _counted(len(step.groups), "group"),
        _counted(len(sequences), "sequence"),
        _counted(len(images), "image"),
        f"at most {_counted(longest, 'sampled token')}",
    ]
    return ", ".join(counts)


def weights_text(step: RecordedStep) -> str:
    """Return where the weights of a replay come from, in words."""
    if step.weights:
        return step.weights_source
    return "random, of the model's shape" if step.random_weights else f"of {step.model_path}"


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def table(outcome: Outcome, step: RecordedStep, subject: Subject, config: Config) -> str:
    """Return the outcome for people."""
    lines = [f"step {step.step}: {size_text(step)}", f"weights: {weights_text(step)}"]
    if step.reason:
        lines.append(f"written because {step.reason}")
    lines += ["", f"{'quantity':<34}{'sides':<22}{'largest':>11}{'bound':>11}"]
    first = outcome.first
    for agreement in outcome.agreements:
        sides = f"{agreement.sides[0]} / {agreement.sides[1]}"
        mark = "" if agreement.agrees else "  differs"
        if agreement is first:
            mark = "  FIRST DIFFERENCE"
        lines.append(
            f"{agreement.quantity!s:<34}{sides:<22}{agreement.difference:>11.3g}"
            f"{agreement.bound:>11.3g}{mark}"
        )
    lines.append("")
    if outcome.left_out:
        lines.append(f"compared up to the logprobs, because of {'; '.join(outcome.left_out)}")
    for side, failure in outcome.failures.items():
        lines.append(f"{side} failed: {failure}")
    if first is None:
        if not outcome.failures:
            lines.append("all implementations agree within what rounding explains")
        return "\n".join(lines)
    lines.append(f"{first.quantity}: {sides_text(first)} part here, {place(first, step, subject)}")
    lines.append(
        f"  {first.values[0]:.6g} and {first.values[1]:.6g}; the largest difference is "
        f"{first.difference:.3g}, and rounding explains {first.bound:.3g}"
    )
    lines += [f"  likely: {reason}" for reason in reasons_for(first, outcome, config)]
    return "\n".join(lines)


def place(agreement: Agreement, step: RecordedStep, subject: Subject) -> str:
    """Return where a difference is, in words: group, trajectory, token with its text, image."""
    owner = agreement.owner
    if isinstance(owner, str):
        if agreement.quantity.stage_name == "vision layer":
            return f"image {image_number(owner, step, subject)}, patch {agreement.index}"
        return owner or "of the whole step"
    g, i, k = owner
    words = f"group {g} ({step.groups[g].id}), trajectory {i}, sequence {k}"
    token = token_index(agreement, step)
    if token is None:
        return words
    sequence = step.groups[g].trajectories[i].sequences[k]
    text = subject.decode(int(sequence.ids[token]))
    words += f", token {token} of {len(sequence.ids)} ({text!r})"
    if subject.image_tokens.mask(sequence.ids[token : token + 1]).any():
        tokens = subject.image_tokens
        grids = np.array([grid for _, grid in sequence.images], np.int64).reshape(-1, 3)
        n_image_tokens = int(tokens.mask(sequence.ids[: token + 1]).sum())
        words += f" of image {int((tokens(grids).cumsum() < n_image_tokens).sum())}"
    return words


def token_index(agreement: Agreement, step: RecordedStep) -> int | None:
    """Return the number of the token in its sequence at which a difference is."""
    if isinstance(agreement.owner, str) or agreement.index < 0:
        return None
    g, i, k = agreement.owner
    sequence = step.groups[g].trajectories[i].sequences[k]
    if agreement.quantity < Quantity.of("logits"):
        if agreement.quantity.stage_name in ("placeholders", "images", "image grids", "pixels"):
            return None
        return min(agreement.index, len(sequence.ids) - 1)
    # From the logits on, values are of sampled tokens.
    sampled = np.flatnonzero(sequence.loss_mask)
    return int(sampled[agreement.index]) if agreement.index < len(sampled) else None


def image_number(digest: str, step: RecordedStep, subject: Subject) -> str:
    """Return the number of the image whose pixels have a digest, among the step's images."""
    images = {image.hash: image for group in step.groups for image, _ in group.images}
    for number, image in enumerate(images.values()):
        if pixel_digest(subject.pixels(image)) == digest:
            return f"{number} ({image.hash[:8]})"
    return digest


def as_json(
    outcome: Outcome, step: RecordedStep, subject: Subject, config: Config
) -> dict[str, Any]:
    """Return the outcome as plain values."""

    def entry(agreement: Agreement) -> dict[str, Any]:
        quantity = agreement.quantity
        return {
            "quantity": str(quantity),
            "stage": quantity.stage_name,
            "layer": quantity.layer,
            "part": quantity.part_name,
            "sides": list(agreement.sides),
            "difference": agreement.difference,
            "bound": agreement.bound,
            "agrees": agreement.agrees,
        }

    first = outcome.first
    result: dict[str, Any] = {
        "step": step.step,
        "reason": step.reason,
        "weights": weights_text(step),
        "sound": outcome.sound,
        "agreements": [entry(agreement) for agreement in outcome.agreements],
        "left_out": outcome.left_out,
        "failures": outcome.failures,
        "first": None,
    }
    if first is not None:
        result["first"] = entry(first) | {
            "place": place(first, step, subject),
            "values": list(first.values),
            "reasons": reasons_for(first, outcome, config),
        }
    return result
