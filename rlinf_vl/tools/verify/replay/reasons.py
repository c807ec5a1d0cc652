"""Likely reasons of a difference, by the quantity in which it first shows, and tests of some."""

import numpy as np

from rlinf_vl.config.schema import Config
from rlinf_vl.tools.verify.replay.compare import Agreement
from rlinf_vl.tools.verify.replay.quantities import Quantity
from rlinf_vl.tools.verify.replay.run import ENGINE, PLAIN, RUN, TRAINER, Outcome

#: By quantity (stage, or "stage, part"): what usually makes it differ.
REASONS = {
    "prompt ids": "another chat template or tokenizer, a repeated begin-of-text token, messages in "
    "another order",
    "images": "images are handed over in another order than their placeholders stand",
    "image grids": "other pixel limits, or grids of images before they were resized",
    "placeholders": "a grid that is not the image's, or placeholders expanded twice or not at all",
    "pixels": "another image processor, mean, size limits or resampling",
    "engine weights": "a weight sync that did not reach the engine, left a weight out (adapters, a "
    "tied head), or was of an earlier version",
    "positions": "positions counted one by one where images need M-RoPE, or computed after packing",
    "rotary angles": "tables of rotary angles in bfloat16, or another base or section layout",
    "vision layer": "attention over the bounds of images, windows or frames; other weights of the "
    "tower",
    "vision features": "features of another image or of older weights in the cache, a projector "
    "with other weights, images that the model does not see",
    "deepstack features": "deepstack features left out, or of another image",
    "embeddings": "a table of embeddings with other weights, or scaled twice or not at all",
    "decoder layer, input": "deepstack features added at another layer or position",
    "decoder layer, attention": "packed sequences that see each other, a wrong page of the KV "
    "cache, a mask or a rotation off by one, weights of the projections",
    "decoder layer, mlp input": "a fused norm, or its epsilon",
    "decoder layer, experts": "a router in another precision, experts of another token",
    "decoder layer, mlp": "a fused MLP, experts weighed otherwise",
    "decoder layer, output": "a residual connection",
    "final norm": "a fused norm, or its epsilon",
    "logits": "a head with other weights (tied or not), hidden states of another token",
    "logprobs": "the temperature, banned ids, targets shifted by one",
    "rollout logprobs": "the run's engine had other weights, another temperature or other images "
    "than the trainer",
    "old logprobs": "old logprobs of other weights or of another forward",
    "advantages": "a standard deviation with n in place of n - 1, rewards of another group",
    "correction weights": "a clip that is not applied, or at another level",
    "loss mask": "a response mask shifted by one, observations trained on",
    "token loss": "clips, a ratio the wrong way up, weights applied twice",
    "loss": "a mean of micro-batch means, denominators of one rank",
    "trained weights": "a part that should be frozen, or is and should not be",
    "gradient norm": "a rank or a micro-batch whose gradient is missing, a gradient averaged twice",
    "gradient": "an operation whose backward is wrong, a micro-batch left out",
    "weight after the step": "weight decay on other weights, another learning rate",
}


#: The run's engine and trainer agree, and differ from the replay by this factor more.
OTHER_WEIGHTS_FACTOR = 10.0
OTHER_WEIGHTS = (
    "tested: the run's engine and trainer agree within {gap:.3g}, and both differ from this replay, "
    "so neither is at fault: the replay has other weights than the run. A replay without the run's "
    "weights trains from the newest checkpoint before the step, on one rank and a CPU; record a "
    "step right behind a checkpoint, or set runner.save_interval lower"
)


def has_other_weights(outcome: Outcome) -> bool:
    """Return whether the run's engine and trainer agree with each other and not with the replay."""
    first = outcome.first
    if first is None or first.quantity.stage_name not in ("rollout logprobs", "old logprobs"):
        return False
    differences = {
        agreement.quantity.stage_name: agreement.difference
        for agreement in outcome.agreements
        if agreement.sides[0] == RUN and not agreement.agrees
    }
    logprobs = [differences.get(name, 0.0) for name in ("rollout logprobs", "old logprobs")]
    return outcome.run_gap is not None and OTHER_WEIGHTS_FACTOR * outcome.run_gap < min(logprobs)


def reasons_for(agreement: Agreement, outcome: Outcome, config: Config) -> list[str]:
    """Return the likely reasons of the first difference, those that were tested first."""
    quantity = agreement.quantity
    name = f"{quantity.stage_name}, {quantity.part_name}" if quantity.part_name else ""
    usual = REASONS.get(name) or REASONS.get(quantity.stage_name, "")
    tested = []
    if quantity.stage_name in ("logprobs", "rollout logprobs"):
        tested = _tested_heads(agreement, outcome, config)
    if quantity.stage_name == "advantages":
        tested = _tested_advantages(agreement)
    if not tested and has_other_weights(outcome):
        # The usual reasons accuse the run's engine or trainer.
        return [OTHER_WEIGHTS.format(gap=outcome.run_gap)]
    return [*tested, *([usual] if usual else [])]


def _tested_heads(agreement: Agreement, outcome: Outcome, config: Config) -> list[str]:
    """Return the changes of the head under which a trace's logprobs are the plain code's."""
    side, owner = agreement.sides[0], agreement.owner
    trace, plain = outcome.traces.get(side), outcome.traces.get(PLAIN)
    if trace is None or plain is None:
        return []
    values = trace.get(agreement.quantity).get(owner)
    logits = plain.get(Quantity.of("logits")).get(owner)
    targets = plain.targets.get(owner)
    if values is None or logits is None or targets is None or plain.banned is None:
        return []
    temperature = config.algorithm.sampling_params.temperature
    masked = np.where(plain.banned, -np.inf, logits)
    hypotheses = {
        f"tested: these are the logprobs at temperature 1, not {temperature:g}": (masked, 1.0, 0),
        "tested: these are the logprobs with the banned ids left in": (logits, temperature, 0),
        "tested: these are the logprobs of targets shifted by one": (masked, temperature, 1),
    }
    confirmed = []
    for text, (scores, divisor, shift) in hypotheses.items():
        scaled = scores / divisor
        log_p = scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)
        expected = log_p[np.arange(len(targets)), np.roll(targets, -shift)]
        n = min(len(values), len(expected)) - shift
        if n > 0 and np.abs(values[:n] - expected[:n]).max() <= max(agreement.bound, 1e-4):
            confirmed.append(text)
    return confirmed


def _tested_advantages(agreement: Agreement) -> list[str]:
    ours, plain = agreement.values
    ratio = ours / plain if plain else 0.0
    for n in range(2, 65):
        if abs(ratio - np.sqrt(n / (n - 1))) < 1e-4:
            return [f"tested: these are divided by the deviation with n, not n - 1 (n = {n})"]
    return []


def sides_text(agreement: Agreement) -> str:
    """Return the two sides in words."""
    names = {
        RUN: "the run",
        TRAINER: "the trainer's code",
        ENGINE: "the engine's code",
        PLAIN: "transformers' plain code",
    }
    return " and ".join(names.get(side, side) for side in agreement.sides)
