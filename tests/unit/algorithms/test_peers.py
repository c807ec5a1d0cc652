"""The same random tensors through our functions and through the code of verl 0.9.1 and TRL 1.16.0.

`THEIRS` has what their code returned. Where it can be found, it is run again: `pip install --no-deps --target FOLDER verl trl`, and
RLINF_VL_PEERS=FOLDER. Their functions are taken out of their files, so that none of what they import is needed.
"""

import ast
import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_vl.algorithms import advantages, aggregate, divergence, policy_loss, token_moments

PEERS = os.environ.get("RLINF_VL_PEERS")
GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2]
LENGTHS = torch.tensor([7, 3, 5, 1, 7, 2, 6, 4, 3])
MASK = torch.arange(7) < LENGTHS.unsqueeze(1)
CLIPS = {
    "vanilla": {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"clip_low": 1.0, "clip_high": 0.5},
    "sapo": {},
}
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LONGEST = 10  #: of `seq-mean-token-sum-norm`
BETA = 0.1

#: (peer, what) → loss and Σ|gradient|, or Σ A·c and Σ A² with c counting tokens from 1 on.
THEIRS: dict[tuple[str, str], tuple[float, float]] = {
    ("verl", "vanilla token-mean"): (0.3653470237004958, 0.44261189796160916),
    ("verl", "vanilla seq-mean-token-mean"): (0.14115287108820682, 0.3829494150702215),
    ("verl", "vanilla seq-mean-token-sum-norm"): (0.15425763222909822, 0.1868805791393461),
    ("verl", "gspo token-mean"): (0.3584708365142387, 0.1867784986966873),
    ("verl", "gspo seq-mean-token-mean"): (0.15053171186625747, 0.157139440599798),
    ("verl", "gspo seq-mean-token-sum-norm"): (0.15135435319490081, 0.07886203278304577),
    ("verl", "cispo token-mean"): (-0.3200831544763769, 0.7045223966778119),
    ("verl", "cispo seq-mean-token-mean"): (-0.31942248938204426, 0.8201416954213725),
    ("verl", "cispo seq-mean-token-sum-norm"): (-0.13514622077891467, 0.29746501193063174),
    ("verl", "sapo seq-mean-token-mean"): (0.1494496453425459, 0.8167208707199247),
    ("verl", "grpo beta 0.0"): (-66.39516595700617, 9.999965359073848),
    ("verl", "grpo beta 0.1"): (306.480494363424, 25.179071826732976),
    ("verl", "dr_grpo beta 0.0"): (-38.33333333333334, 3.333333333333333),
    ("verl", "dr_grpo beta 0.1"): (-11.317275387374565, 3.0391182164777755),
    ("verl", "rloo beta 0.0"): (-57.5, 7.5),
    ("verl", "rloo beta 0.1"): (-20.43924845956741, 6.827082737611914),
    ("verl", "reinforce_plus_plus beta 0.0"): (-241.66751157127175, 36.99999834236513),
    ("verl", "reinforce_plus_plus beta 0.1"): (-213.17688989308283, 36.99999834410064),
    ("verl", "reinforce_plus_plus_baseline beta 0.0"): (-127.71386583736059, 36.9999959027373),
    ("verl", "reinforce_plus_plus_baseline beta 0.1"): (-80.37875500119925, 36.99999549889405),
    ("TRL", "grpo"): (0.14115286963641913, 0.3829494159510561),
    ("TRL", "dapo"): (0.3653470237004958, 0.44261189796160916),
    ("TRL", "dr_grpo"): (0.15425763222909825, 0.1868805791393461),
    ("TRL", "gspo"): (0.15053171066470775, 0.15713944093059487),
    ("TRL", "cispo"): (-0.3200831544763769, 0.7045223966778119),
    ("TRL", "sapo"): (0.14944968321417904, 0.8167208765137228),
}


def drawn() -> dict[str, torch.Tensor]:
    """logprobs, old, advantages, reference [9, 7] and rewards [9], float64; half of the ratios are beyond their clips."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    old = -normal(9, 7).abs() - 0.1
    rewards = torch.randint(0, 3, (9,), generator=generator).double()
    rewards[-2:] = 1.0  # a group that ties
    return {
        "old": old,
        "logprobs": old + 0.5 * normal(9, 7),
        "reference": old + 0.3 * normal(9, 7),
        "advantages": normal(9, 1).expand(9, 7),
        "rewards": rewards,
    }


def with_gradient(loss_of: Any) -> tuple[float, float]:
    tensors = drawn()
    logprobs = tensors["logprobs"].requires_grad_()
    loss = loss_of(logprobs, tensors)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.abs().sum().item()


def summed(values: torch.Tensor) -> tuple[float, float]:
    """Of advantages [9, 7]."""
    values = values.where(MASK, 0.0)
    return (values * torch.arange(1, 64).view(9, 7)).sum().item(), values.square().sum().item()


# ours


def our_loss(kind: str, mode: str) -> tuple[float, float]:
    def loss_of(logprobs, t):
        kind_here = {"vanilla": "actor"}.get(kind, kind)
        per_token, _ = policy_loss(logprobs, t["old"], t["advantages"], MASK, loss_type=kind_here, **CLIPS[kind])
        if mode == "seq-mean-token-sum-norm":
            return aggregate(per_token, MASK, None, "seq-mean-token-sum", denominator=9 * LONGEST)
        return aggregate(per_token, MASK, None, mode)

    return with_gradient(loss_of)


def our_advantages(kind: str, beta: float) -> tuple[float, float]:
    t = drawn()
    kl = divergence(t["reference"], t["old"], MASK, "k1") * beta
    kind_here, normalize = {"dr_grpo": ("dr_grpo", False), "rloo": ("rloo", False)}.get(kind, (kind, True))
    if kind == "reinforce_plus_plus" and beta:
        tokens = (t["rewards"].unsqueeze(1) - kl.flip(1).cumsum(1).flip(1))[MASK]
        count = torch.tensor(float(len(tokens)))
        mean, deviation = token_moments(count, tokens.sum(), lambda mean: (tokens - mean).square().sum())
        values = torch.zeros(9, 7, dtype=torch.float64)
        values[MASK] = (tokens - mean) / deviation
        return summed(values)
    rewards = t["rewards"] - kl.sum(1)
    return summed(advantages(kind_here, rewards, GROUPS, LENGTHS, normalize=normalize).unsqueeze(1).expand(9, 7))


# theirs


def functions_of(path: Path, *names: str, **given: Any) -> SimpleNamespace:
    """Functions of a file, without their decorators and with nothing around them but what is given."""
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
    there = {"torch": torch, "np": np, "defaultdict": defaultdict, "Any": Any} | given
    exec(compile(ast.Module(found, []), str(path), "exec"), there)
    return SimpleNamespace(**{name: there[name] for name in names})


class ActorConfig(SimpleNamespace):
    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def verl() -> SimpleNamespace:
    assert PEERS is not None
    masked = functions_of(
        Path(PEERS, "verl/utils/torch_functional.py"), "masked_sum", "masked_mean", "masked_var", "masked_whiten"
    )
    losses = [f"compute_policy_loss_{kind}" for kind in CLIPS]
    estimators = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    estimators = [f"compute_{kind}_outcome_advantage" for kind in estimators]
    given = {"verl_F": masked, "ActorConfig": ActorConfig, "AlgoConfig": type("AlgoConfig", (), {})}
    names = *losses, *estimators, "agg_loss", "kl_penalty_forward"
    return functions_of(Path(PEERS, "verl/trainer/ppo/core_algos.py"), *names, **given)


def verl_loss(kind: str, mode: str) -> tuple[float, float]:
    code, clips = verl(), CLIPS[kind]
    info = {"loss_scale_factor": LONGEST} if mode.endswith("norm") else {}
    config = ActorConfig(
        clip_ratio=0.2, clip_ratio_low=clips.get("clip_low"), clip_ratio_high=clips.get("clip_high"),
        clip_ratio_c=3.0, tau_pos=1.0, tau_neg=1.05, global_batch_info=info,
    )  # fmt: skip

    def loss_of(logprobs, t):
        function = getattr(code, f"compute_policy_loss_{kind}")
        return function(t["old"], logprobs, t["advantages"], MASK.double(), mode, config, None)[0]

    return with_gradient(loss_of)


def verl_advantages(kind: str, beta: float) -> tuple[float, float]:
    code, t = verl(), drawn()
    mask = MASK.double()
    rewards = torch.zeros(9, 7, dtype=torch.float64)
    rewards[torch.arange(9), LENGTHS - 1] = t["rewards"]
    rewards = rewards - beta * code.kl_penalty_forward(t["old"], t["reference"], "kl") * mask
    options: dict[str, Any] = {}
    if kind in ("grpo", "dr_grpo"):
        options["norm_adv_by_std_in_grpo"] = kind == "grpo"
    if kind != "reinforce_plus_plus":
        options["index"] = np.array(GROUPS)
    name = "grpo" if kind == "dr_grpo" else kind
    function = getattr(code, f"compute_{name}_outcome_advantage")
    return summed(function(rewards, mask, config=SimpleNamespace(gamma=1.0), **options)[0])


def trl_loss(kind: str) -> tuple[float, float]:
    """The part of `GRPOTrainer._compute_loss` from the ratio to the loss."""
    assert PEERS is not None
    path = Path(PEERS, "trl/trainer/grpo_trainer.py")
    (trainer,) = [
        n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "GRPOTrainer"
    ]
    (function,) = [n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == "_compute_loss"]
    begins = [isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "log_ratio" for n in function.body].index(True)
    ends = ["self._entropy_bonus_enabled" in ast.unparse(n) for n in function.body].index(True)
    code = compile(ast.Module(function.body[begins:ends], []), str(path), "exec")
    clips = CLIPS[TRL[kind][0]]
    high = 1 + clips["clip_high"] if kind == "cispo" else clips.get("clip_high")
    trainer = SimpleNamespace(
        importance_sampling_level="sequence" if kind == "gspo" else "token", beta=0.0, use_vllm=False,
        loss_type="grpo" if kind == "gspo" else kind, epsilon_low=clips.get("clip_low"), epsilon_high=high,
        args=SimpleNamespace(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1),
        off_policy_mask_threshold=None, max_completion_length=LONGEST, current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True), accelerator=SimpleNamespace(num_processes=1),
    )  # fmt: skip

    def loss_of(logprobs, t):
        there = {
            "torch": torch, "self": trainer, "per_token_logps": logprobs, "old_per_token_logps": t["old"],
            "advantages": t["advantages"][:, :1], "mask": MASK.double(), "entropy_mask": None,
            "inputs": {"num_items_in_batch": MASK.sum()},
        }  # fmt: skip
        exec(code, there)
        return there["loss"]

    return with_gradient(loss_of)


#: TRL's loss type → ours and its aggregation.
TRL = {
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "dapo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "gspo": ("gspo", "seq-mean-token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
CASES: dict[tuple[str, str], tuple[Any, Any]] = {}  # → ours, theirs
for _kind in CLIPS:
    for _mode in MODES if _kind != "sapo" else MODES[1:2]:
        CASES["verl", f"{_kind} {_mode}"] = partial(our_loss, _kind, _mode), partial(verl_loss, _kind, _mode)
for _kind in ESTIMATORS:
    for _beta in (0.0, BETA):
        _what = f"{_kind} beta {_beta}"
        CASES["verl", _what] = partial(our_advantages, _kind, _beta), partial(verl_advantages, _kind, _beta)
for _kind, (_ours, _mode) in TRL.items():
    CASES["TRL", _kind] = partial(our_loss, _ours, _mode), partial(trl_loss, _kind)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_our_numbers_are_what_their_code_returned(case):
    ours, _ = CASES[case]
    assert ours() == pytest.approx(THEIRS[case], rel=1e-6, abs=1e-6)


@pytest.mark.skipif(PEERS is None, reason="RLINF_VL_PEERS names no folder with verl and trl")
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_our_numbers_are_what_their_code_returns(case):
    ours, theirs = CASES[case]
    assert ours() == pytest.approx(theirs(), rel=1e-6, abs=1e-6)
    assert theirs() == pytest.approx(THEIRS[case], rel=1e-9)
