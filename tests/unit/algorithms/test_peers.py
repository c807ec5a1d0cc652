"""The same random tensors through our functions and through the code of verl 0.9.1 and TRL 1.16.0.

`THEIRS` has what their code returned. Where it can be found, it is run again: `pip install --no-deps --target FOLDER verl trl`, and
RLINF_VL_PEERS=FOLDER. Their functions are taken out of their files, so that none of what they import is needed.
"""

import ast
import importlib
import math
import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
import torch

from rlinf_vl.algorithms import (
    LossInputs,
    advantages,
    aggregate,
    decoupled_advantages,
    divergence,
    importance_weights,
    policy_loss,
    rejection_mask,
    token_moments,
    weight_totals,
)
from rlinf_vl.algorithms.losses import weighted_loss

PEERS = os.environ.get("RLINF_VL_PEERS")
GROUPS = [0, 0, 0, 1, 1, 1, 1, 2, 2]
LENGTHS = torch.tensor([7, 3, 5, 1, 7, 2, 6, 4, 3])
MASK = torch.arange(7) < LENGTHS.unsqueeze(1)
CLIPS = {
    "vanilla": {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"clip_low": 1.0, "clip_high": 0.5},
    "sapo": {},
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.04, "clip_c": 1.5},
    "dppo_kl": {"clip_low": 0.01, "clip_high": 0.02, "clip_c": 1.5},
    "geo_mean": {"clip_low": 0.3, "clip_high": 0.4},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.1},
    "clip_cov": {"clip_low": 0.2, "clip_high": 0.28},
    "kl_cov": {},
}
#: Names that differ: theirs → ours, and ours → theirs.
OUR_NAMES = {"vanilla": "actor", "geo_mean": "gmpo"}
VERL_NAMES = {"gspo_token": "gspo"}
#: Of the losses that choose tokens by their covariance: their share, and Clip-Cov's bounds.
COVARIANCE = {"clip_cov": (1.0, 0.1, 0.6), "kl_cov": (0.2,)}
#: Losses that only one aggregation belongs to.
ONE_MODE = ("sapo", "geo_mean")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LONGEST = 10  #: of `seq-mean-token-sum-norm`
DENOMINATORS = {"token-mean": int(MASK.sum()), "seq-mean-token-mean": len(LENGTHS)}
BETA = 0.1

#: Three rewards of nine answers in groups of three: their weights, and TRL's epsilon.
DECOUPLED = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64)
TRL_EPS = 1e-4

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
    ("verl", "token weights of mean 1 token-mean"): (0.30833968333725603, 0.40374326084180445),
    ("verl", "token weights of mean 1 seq-mean-token-mean"): (
        0.054781494831695116,
        0.3570222678977985,
    ),
    ("verl", "sequence weights of mean 1 token-mean"): (0.05972440989553243, 0.305261752347105),
    ("verl", "sequence weights of mean 1 seq-mean-token-mean"): (
        -0.10574095466497378,
        0.2976412178996921,
    ),
    ("verl", "clip_cov token-mean"): (0.3205957360477109, 0.37243980544643496),
    ("verl", "clip_cov seq-mean-token-mean"): (0.11305666652368439, 0.33338675310928095),
    ("verl", "clip_cov seq-mean-token-sum-norm"): (0.13536264410903348, 0.15725236229960587),
    ("verl", "kl_cov token-mean"): (0.3674815564366477, 0.6700014805195298),
    ("verl", "kl_cov seq-mean-token-mean"): (0.11112673217227817, 0.7539799261499938),
    ("verl", "kl_cov seq-mean-token-sum-norm"): (0.15515887938436235, 0.2828895139971348),
    ("verl", "sapo seq-mean-token-mean"): (0.1494496453425459, 0.8167208707199247),
    ("verl", "dppo_tv token-mean"): (-0.5973601246341751, 0.5174912169776182),
    ("verl", "dppo_tv seq-mean-token-mean"): (-0.517667448036357, 0.4425582194615935),
    ("verl", "dppo_tv seq-mean-token-sum-norm"): (-0.252218719289985, 0.21849629161277218),
    ("verl", "dppo_kl token-mean"): (-0.7271416831278413, 0.5720472500157248),
    ("verl", "dppo_kl seq-mean-token-mean"): (-0.6143243247743742, 0.4816435119083832),
    ("verl", "dppo_kl seq-mean-token-sum-norm"): (-0.30701537732064405, 0.24153106111775047),
    ("verl", "geo_mean seq-mean-token-mean"): (0.07634575633112112, 0.40893540060084865),
    ("verl", "gspo_token seq-mean-token-mean"): (0.8495715726181224, 1.1509742840284163),
    ("verl", "opo beta 0.0"): (-38.33333333333334, 3.333333333333333),
    ("verl", "opo beta 0.1"): (-31.439013558522667, 3.019261464131989),
    ("verl", "gpg beta 0.0"): (-115.00000000000004, 30.0),
    ("verl", "gpg beta 0.1"): (-11.317275387374565, 3.0391182164777755),
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
    ("verl", "token weights token-mean"): (0.29483358722238384, 0.3860582349390667),
    ("verl", "token weights seq-mean-token-mean"): (0.05238192002995293, 0.34138374543066885),
    ("verl", "sequence weights token-mean"): (0.06135719352936208, 0.3136071909062861),
    ("verl", "sequence weights seq-mean-token-mean"): (-0.10863176765926691, 0.3057783214757644),
    ("verl", "rejected tokens token-mean"): (0.27227719806206996, 0.33996699147473347),
    ("verl", "rejected tokens seq-mean-token-mean"): (0.11349347119238466, 0.3521379488769466),
    ("verl", "rejected means token-mean"): (0.12494733116231649, 0.14692634996680948),
    ("verl", "rejected means seq-mean-token-mean"): (0.0858661174015201, 0.11830618541802046),
    ("verl", "MIS token-mean"): (0.12679657813058423, 0.2130614763397744),
    ("verl", "MIS seq-mean-token-mean"): (-0.07669068629126323, 0.23979394755229955),
    ("verl", "MIS, not truncated token-mean"): (-0.02171366179581527, 0.26327082558476084),
    ("verl", "MIS, not truncated seq-mean-token-mean"): (-0.16626829119826636, 0.270078951815535),
    ("verl", "IcePop token-mean"): (0.2807305929804162, 0.38626372904228323),
    ("TRL", "IcePop"): (0.2807305929804162, 0.38626372904228323),
    ("TRL", "MIS, not truncated"): (-0.02171366179581527, 0.26327082558476084),
    ("TRL", "grpo"): (0.14115286963641913, 0.3829494159510561),
    ("TRL", "dapo"): (0.3653470237004958, 0.44261189796160916),
    ("TRL", "dr_grpo"): (0.15425763222909825, 0.1868805791393461),
    ("TRL", "gspo"): (0.15053171066470775, 0.15713944093059487),
    ("TRL", "cispo"): (-0.3200831544763769, 0.7045223966778119),
    ("TRL", "sapo"): (0.14944968321417904, 0.8167208765137228),
    ("TRL", "normalize_then_sum"): (204.62745653001738, 32.00984647110995),
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


def drawn_for(kind: str) -> dict[str, torch.Tensor]:
    """As `drawn`. For a divergence all probabilities are below 1; GSPO-token has advantages of tokens."""
    tensors = drawn()
    if kind.startswith("dppo"):
        tensors["old"], tensors["logprobs"] = tensors["old"] - 1.5, tensors["logprobs"] - 1.5
        assert tensors["logprobs"].max() < 0
    if kind == "gspo_token":
        generator = torch.Generator().manual_seed(1)
        tensors["advantages"] = torch.randn(9, 7, generator=generator, dtype=torch.float64)
    return tensors


def with_gradient(loss_of: Any, kind: str = "") -> tuple[float, float]:
    tensors = drawn_for(kind)
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
        kind_here = OUR_NAMES.get(kind, kind)
        if kind in COVARIANCE:
            per_token = chosen_by_covariance(kind, logprobs, t)
        else:
            per_token, _ = policy_loss(
                logprobs, t["old"], t["advantages"], MASK, loss_type=kind_here, **CLIPS[kind]
            )
        if mode == "seq-mean-token-sum-norm":
            return aggregate(per_token, MASK, None, "seq-mean-token-sum", denominator=9 * LONGEST)
        return aggregate(per_token, MASK, None, mode)

    return with_gradient(loss_of, kind)


def chosen_by_covariance(kind: str, logprobs, t) -> torch.Tensor:
    """Our loss per token, with the share and bounds of `COVARIANCE`; theirs takes the current logprobs as those of the start."""
    inputs = LossInputs(
        logprobs=logprobs, old_logprobs=t["old"], advantages=t["advantages"], mask=MASK,
        start_logprobs=logprobs.detach(), **CLIPS[kind],
    )  # fmt: skip
    file = importlib.import_module(f"rlinf_vl.algorithms.losses.{kind}")
    names = ("SHARE", "LOW", "HIGH")[: len(COVARIANCE[kind])]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(names, COVARIANCE[kind], strict=True):
            patch.setattr(file, name, value)
        per_token, _ = weighted_loss(inputs, file.loss)
        plain, _ = policy_loss(
            logprobs, t["old"], t["advantages"], MASK, clip_low=9.0, clip_high=9.0
        )
        assert (per_token != plain)[MASK].any()
    return per_token


def our_advantages(kind: str, beta: float) -> tuple[float, float]:
    t = drawn()
    kl = divergence(t["reference"], t["old"], MASK, "k1") * beta
    kind_here, normalize = kind, kind not in ("dr_grpo", "rloo", "opo", "gpg")
    if kind == "reinforce_plus_plus" and beta:
        tokens = (t["rewards"].unsqueeze(1) - kl.flip(1).cumsum(1).flip(1))[MASK]
        count = torch.tensor(float(len(tokens)))
        mean, deviation = token_moments(
            count, tokens.sum(), lambda mean: (tokens - mean).square().sum()
        )
        values = torch.zeros(9, 7, dtype=torch.float64)
        values[MASK] = (tokens - mean) / deviation
        return summed(values)
    rewards = t["rewards"] - kl.sum(1)
    return summed(
        advantages(kind_here, rewards, GROUPS, LENGTHS, normalize=normalize)
        .unsqueeze(1)
        .expand(9, 7)
    )


def drawn_parts() -> torch.Tensor:
    """Rewards [9, 3], float64, of different scale; the second ties in a group and is missing twice, the last row has none."""
    generator = torch.Generator().manual_seed(2)
    scale = torch.tensor([1.0, 50.0, 0.01], dtype=torch.float64)
    parts = torch.randint(0, 4, (9, 3), generator=generator).double() * scale
    parts[:3, 1] = 7.0
    parts[4, 1] = parts[8, :] = float("nan")
    return parts


def our_decoupled() -> tuple[float, float]:
    values = decoupled_advantages(drawn_parts(), DECOUPLED, [n // 3 for n in range(9)], eps=TRL_EPS)
    return summed(values.unsqueeze(1).expand(9, 7))


#: What corrects for the engine → our weights (level, bound) and rejection (level, bounds).
CORRECTED: dict[str, tuple[Any, Any]] = {
    "token weights": (("token", 1.2), None),
    "sequence weights": (("sequence", 2.0), None),
    "rejected tokens": (None, ("token", 0.7, 1.5)),
    "rejected means": (("token", 2.0), ("geometric", 0.9, 1.05)),
    "MIS": (("sequence", 2.0), ("sequence", 0.5, 2.0)),
    "MIS, not truncated": (("sequence", math.inf), ("sequence", 0.5, 4.0)),
    "IcePop": (("token", math.inf), ("token", 0.5, 1.6)),
    "token weights of mean 1": (("token", 1.2), None),
    "sequence weights of mean 1": (("sequence", 2.0), None),
}
MEAN_1 = " of mean 1"


def our_correction(kind: str, mode: str) -> tuple[float, float]:
    """The clipped loss of what the engine, which has `reference`, has sampled; in units of all tokens or sequences."""
    weights, rejection = CORRECTED[kind]

    def loss_of(logprobs, t):
        pair, w, kept = (t["old"], t["reference"]), None, MASK
        if weights:
            w = importance_weights(*pair, MASK, level=weights[0], clip=weights[1])
            if kind.endswith(MEAN_1):
                owners = torch.zeros(MASK.shape, dtype=torch.int64)
                total, n = weight_totals(w, MASK, level=weights[0], owners=owners, n_owners=1)
                assert abs(total / n - 1) > 0.01
                w = w * n / total
        if rejection:
            level, low, high = rejection
            kept = rejection_mask(*pair, MASK, level=level, low=low, high=high)
            assert 0.05 < kept[MASK].double().mean() < 0.95
        per_token, _ = policy_loss(
            logprobs, t["old"], t["advantages"], kept, weights=w, **CLIPS["vanilla"]
        )
        return aggregate(per_token, kept, None, mode, denominator=DENOMINATORS[mode])

    return with_gradient(loss_of)


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
        Path(PEERS, "verl/utils/torch_functional.py"),
        "masked_sum",
        "masked_mean",
        "masked_var",
        "masked_whiten",
    )
    losses = [f"compute_policy_loss_{kind}" for kind in CLIPS if kind not in VERL_NAMES]
    estimators = (
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
    )
    estimators = [f"compute_{kind}_outcome_advantage" for kind in estimators]
    given = {"verl_F": masked, "ActorConfig": ActorConfig, "AlgoConfig": type("AlgoConfig", (), {})}
    names = *losses, *estimators, "agg_loss", "kl_penalty_forward"
    found = functions_of(Path(PEERS, "verl/trainer/ppo/core_algos.py"), *names, **given)
    path = Path(PEERS, "verl/trainer/ppo/rollout_corr_helper.py")
    own = (
        "_parse_rollout_is_threshold",
        "_parse_rollout_rs_thresholds",
        "compute_rs_metrics",
        "compute_is_metrics",
    )
    wanted = "compute_rollout_rejection_mask", "compute_rollout_correction_weights"
    tokens = {f"token_k{k}" for k in (1, 2, 3)}
    constants: dict[str, Any] = {"SAFETY_BOUND": 20.0, "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": tokens}
    constants["SUPPORTED_ROLLOUT_RS_OPTIONS"] = tokens | {"seq_sum_k1", "seq_mean_k1"}
    given = {"verl_F": masked, "math": math, "Optional": Optional} | constants
    corrections = functions_of(path, *own, *wanted, **given)
    return SimpleNamespace(**vars(found), **vars(corrections))


def verl_loss(kind: str, mode: str) -> tuple[float, float]:
    code, clips = verl(), CLIPS[kind]
    info = {"loss_scale_factor": LONGEST} if mode.endswith("norm") else {}
    config = ActorConfig(
        clip_ratio=0.2, clip_ratio_low=clips.get("clip_low"), clip_ratio_high=clips.get("clip_high"),
        clip_ratio_c=clips.get("clip_c", 3.0), tau_pos=1.0, tau_neg=1.05, global_batch_info=info,
        policy_loss=SimpleNamespace(
            clip_cov_ratio=COVARIANCE["clip_cov"][0], clip_cov_lb=COVARIANCE["clip_cov"][1],
            clip_cov_ub=COVARIANCE["clip_cov"][2], kl_cov_ratio=COVARIANCE["kl_cov"][0], ppo_kl_coef=1.0,
        ),
    )  # fmt: skip

    def loss_of(logprobs, t):
        function = getattr(code, f"compute_policy_loss_{VERL_NAMES.get(kind, kind)}")
        return function(t["old"], logprobs, t["advantages"], MASK.double(), mode, config, None)[0]

    return with_gradient(loss_of, kind)


def verl_correction(kind: str, mode: str) -> tuple[float, float]:
    """Their bounds of rejection are of exp(rollout - train), and their trainer's denominators count what is rejected, too."""
    code, (weights, rejection) = verl(), CORRECTED[kind]
    counts = {"batch_num_tokens": int(MASK.sum()), "global_batch_size": len(MASK)}
    config = ActorConfig(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, global_batch_info=counts
    )  # fmt: skip

    def loss_of(logprobs, t):
        log_ratio, mask, w = t["old"] - t["reference"], MASK.double(), None
        if weights:
            level, threshold = weights
            if kind == "IcePop":
                threshold = f"{rejection[1]}_{rejection[2]}"
            w, _ = code.compute_rollout_correction_weights(
                log_ratio, mask, level, threshold, kind.endswith(MEAN_1)
            )
        if rejection and kind != "IcePop":
            option = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[
                rejection[0]
            ]
            bounds = f"{1 / rejection[2]}_{1 / rejection[1]}"
            mask, _ = code.compute_rollout_rejection_mask(log_ratio, mask, option, bounds)
        return code.compute_policy_loss_vanilla(
            t["old"], logprobs, t["advantages"], mask, mode, config, w
        )[0]

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
    values = function(rewards, mask, config=SimpleNamespace(gamma=1.0), **options)[0]
    if kind == "gpg":
        # Their scale is all trajectories over those whose reward is not 0; the paper's, and ours,
        # over those of groups that do not tie, which are three or, with a KL, all nine.
        n_scored = int(torch.count_nonzero(rewards.sum(1)))
        values = values * n_scored / (9 if beta else 3)
    return summed(values)


def trl_method(name: str) -> ast.FunctionDef:
    (trainer,) = [
        n for n in ast.parse(trl_file().read_text()).body if getattr(n, "name", "") == "GRPOTrainer"
    ]
    assert isinstance(trainer, ast.ClassDef)
    (function,) = [n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == name]
    return function


def trl_file() -> Path:
    assert PEERS is not None
    return Path(PEERS, "trl/trainer/grpo_trainer.py")


def trl_weights(kind: str) -> torch.Tensor:
    """`GRPOTrainer`'s weights of what vLLM, which has `reference`, has sampled, 0 where they are masked."""
    _, (level, low, high) = CORRECTED[kind]
    (block,) = [
        node
        for node in ast.walk(trl_method("_generate_and_score_completions"))
        if isinstance(node, ast.If)
        and any(ast.unparse(n).startswith("per_token_logps_diff =") for n in node.body)
    ]
    trainer = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=f"{level}_mask",
        vllm_importance_sampling_clip_min=low, vllm_importance_sampling_clip_max=high,
    )  # fmt: skip
    t = drawn()
    there = {
        "torch": torch, "math": math, "self": trainer, "old_per_token_logps": t["old"],
        "sampling_per_token_logps": t["reference"], "completion_mask": MASK.double(), "tool_mask": None,
    }  # fmt: skip
    exec(compile(ast.Module([block], []), str(trl_file()), "exec"), there)
    return there["vllm_importance_sampling_ratio"]


def trl_decoupled() -> tuple[float, float]:
    """The part of `GRPOTrainer` from the rewards of each function to the advantages."""
    assert PEERS is not None
    body = trl_method("_generate_and_score_completions").body
    (begins,) = [
        n
        for n, node in enumerate(body)
        if isinstance(node, ast.If) and "'normalize_then_sum'" in ast.unparse(node)
    ]
    trainer = SimpleNamespace(
        multi_objective_aggregation="normalize_then_sum", reward_funcs=[None] * 3, reward_weights=DECOUPLED
    )  # fmt: skip
    parts = drawn_parts()
    there = {
        "torch": torch, "self": trainer, "rewards_per_func": parts, "num_generations": 3, "device": "cpu",
        "unscorable_mask": parts.isnan().all(1),
    } | vars(functions_of(Path(PEERS, "trl/trainer/utils.py"), "nanstd"))  # fmt: skip
    # With the statement behind it, which makes an advantage of 0 of each row without a reward.
    exec(compile(ast.Module(body[begins : begins + 2], []), str(trl_file()), "exec"), there)
    return summed(there["advantages"].unsqueeze(1).expand(9, 7))


def trl_loss(kind: str, corrected: str | None = None) -> tuple[float, float]:
    """The part of `GRPOTrainer._compute_loss` from the ratio to the loss."""
    path, function = trl_file(), trl_method("_compute_loss")
    begins = [
        isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "log_ratio"
        for n in function.body
    ].index(True)
    ends = ["self._entropy_bonus_enabled" in ast.unparse(n) for n in function.body].index(True)
    code = compile(ast.Module(function.body[begins:ends], []), str(path), "exec")
    clips = CLIPS[TRL[kind][0]]
    high = 1 + clips["clip_high"] if kind == "cispo" else clips.get("clip_high")
    trainer = SimpleNamespace(
        importance_sampling_level="sequence" if kind == "gspo" else "token", beta=0.0,
        use_vllm=corrected is not None, vllm_importance_sampling_correction=True,
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
        if corrected:
            there["inputs"]["importance_sampling_ratio"] = trl_weights(corrected)
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
ESTIMATORS = (
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg",
)  # fmt: skip
CASES: dict[tuple[str, str], tuple[Any, Any]] = {}  # → ours, theirs
for _kind in CLIPS:
    if _kind in ONE_MODE or _kind in VERL_NAMES:  # as their function has it, whatever it is told
        _modes = MODES[1:2]
    else:
        _modes = MODES
    for _mode in _modes:
        CASES["verl", f"{_kind} {_mode}"] = (
            partial(our_loss, _kind, _mode),
            partial(verl_loss, _kind, _mode),
        )
for _kind in CORRECTED:
    # Its weights of 0 count in a sequence's own mean.
    for _mode in DENOMINATORS if _kind != "IcePop" else MODES[:1]:
        _what = f"{_kind} {_mode}"
        CASES["verl", _what] = (
            partial(our_correction, _kind, _mode),
            partial(verl_correction, _kind, _mode),
        )
for _kind in ESTIMATORS:
    for _beta in (0.0, BETA):
        _what = f"{_kind} beta {_beta}"
        CASES["verl", _what] = (
            partial(our_advantages, _kind, _beta),
            partial(verl_advantages, _kind, _beta),
        )
for _kind in ("IcePop", "MIS, not truncated"):
    CASES["TRL", _kind] = (
        partial(our_correction, _kind, "token-mean"),
        partial(trl_loss, "dapo", _kind),
    )
CASES["TRL", "normalize_then_sum"] = our_decoupled, trl_decoupled
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
