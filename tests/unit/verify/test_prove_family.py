"""`rlinf-vl prove-family`: sound families are proven on every path, and planted faults are found."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rlinf_vl.__main__ import main
from rlinf_vl.models import layers
from rlinf_vl.models.attention import SegmentAttention
from rlinf_vl.models.families import FAMILIES, family_at
from rlinf_vl.models.family import Family, VisionFeatures
from rlinf_vl.models.image_processor import QwenImages
from rlinf_vl.models.image_tokens import ImageTokens, mrope_positions
from rlinf_vl.models.layers import frame_attention
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.tools.check.certificates import FOLDER, certificates, not_proven, proven_wrong
from rlinf_vl.tools.verify.prove.certificate import Outcome, outcomes_of
from rlinf_vl.tools.verify.prove.main import RELEASED
from rlinf_vl.tools.verify.prove.member import member_of, tiny_config
from rlinf_vl.tools.verify.prove.proofs import Proofs

RANKS = ("two ranks", "context parallel")
#: Paths that start processes; tests/integration/sglang has the last.
PROCESSES = (*RANKS, "sglang")


def proofs_of(family: Family, folder: Path) -> Proofs:
    config = AutoConfig.for_model(family.model_type)
    return Proofs(member_of(family, config, folder))


def outcomes(family: Family, folder: Path, *paths: str) -> dict[str, Outcome]:
    """The outcomes by path, of all in this process unless some are named."""
    proofs = proofs_of(family, folder)
    chosen = paths or [path for path in proofs.paths if path not in PROCESSES]
    return {outcome.path: outcome for outcome in outcomes_of(proofs, chosen.__contains__)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_proven(name, tmp_path):
    found = outcomes(FAMILIES[name], tmp_path)
    wrong = {path: outcome for path, outcome in found.items() if outcome.status == "wrong"}
    assert not wrong
    refused = {path for path, outcome in found.items() if outcome.status == "refused"}
    # A model type has no tokenizer.
    without_tower = set() if FAMILIES[name].vision_tower else {"cached features", "video"}
    assert refused == {"prompts", "words"} | without_tower


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("qwen3_5_moe", marks=pytest.mark.nightly), "qwen2_5_vl"]
)
def test_ranks_are_proven(name, tmp_path):
    found = outcomes(FAMILIES[name], tmp_path, *RANKS)
    assert {path: outcome.status for path, outcome in found.items()} == dict.fromkeys(
        RANKS, "proven"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_member_has_every_kind_of_layer(name):
    config = AutoConfig.for_model(name)
    text, tiny = config.get_text_config(), tiny_config(config)
    small = tiny.get_text_config()
    kinds = getattr(text, "layer_types", None)
    assert set(getattr(small, "layer_types", None) or ()) == set(kinds or ())
    assert 2 <= small.num_hidden_layers <= 4
    model = FAMILIES[name].model_class.from_config(tiny)
    assert sum(p.numel() for p in model.parameters()) < 3e6
    if FAMILIES[name].mixture(config):
        assert FAMILIES[name].mixture(tiny)
    if name.startswith("qwen3_vl"):
        assert tiny.vision_config.deepstack_visual_indexes == [0, 2, 3]
        assert tiny.vision_config.depth == 4 and small.num_hidden_layers == 3


def test_dense_layers_among_mixtures_are_in_the_member():
    config = AutoConfig.for_model("qwen3_vl_moe")
    config.text_config.mlp_only_layers = [5, 7]
    text = tiny_config(config).get_text_config()
    assert (text.num_hidden_layers, text.mlp_only_layers) == (3, [1])


# --- planted faults ---------------------------------------------------------------------------------------------------


def with_text(change: Callable[..., Any]) -> Callable[[Family], Family]:
    """A fault of the text model's forward: `change(forward, text_model, embeds, positions, …)`."""

    def planted(family: Family) -> Family:
        def forward(*arguments, **options):
            return change(family.text_forward, *arguments, **options)

        return replace(family, text_forward=forward)

    return planted


def with_layer(suffix: str, forward: Callable[..., Any]) -> Callable[[Family], Family]:
    """A fault of the layers whose class ends so."""

    def planted(family: Family) -> Family:
        sound = family.layers()
        assert any(name.endswith(suffix) for name in sound)
        changed = {name: forward if name.endswith(suffix) else f for name, f in sound.items()}
        return replace(family, layers=lambda: changed)

    return planted


def with_images(change: Callable[..., VisionFeatures]) -> Callable[[Family], Family]:
    """A fault of the vision tower: `change(encode, tower, patches, grids, dtype)`."""

    def planted(family: Family) -> Family:
        def encode(*arguments):
            return change(family.encode_images, *arguments)

        return replace(family, encode_images=encode)

    return planted


def with_positions(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Family], Family]:
    def positions(ids: np.ndarray, grids: np.ndarray, tokens: ImageTokens) -> np.ndarray:
        return change(mrope_positions(ids, grids, tokens))

    return lambda family: replace(family, positions=positions)


def without_times(family: Family) -> Family:
    def positions(ids: np.ndarray, grids: np.ndarray, tokens: ImageTokens) -> np.ndarray:
        return mrope_positions(ids, grids, replace(tokens, tokens_per_second=None))

    return replace(family, positions=positions)


def late(positions: np.ndarray) -> np.ndarray:
    return np.concatenate([positions[:1], positions[1:] - (positions[1:] > 8)])


class WrongCounts(QwenImages):
    """Says that an image has four tokens for each that it has."""

    def image_tokens(self, placeholder_id: int) -> ImageTokens:
        return ImageTokens(placeholder_id, self._merge_size // 2)


class Leaking(SegmentAttention):
    """Lets a token attend to all before it in the row, of other sequences, too."""

    def attend(self, layer, q, k, v, scaling):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)


def rope_base(forward, text_model, *arguments, **options):
    rotary = text_model.rotary_emb
    sound = rotary.inv_freq
    rotary.inv_freq = sound**1.05
    try:
        return forward(text_model, *arguments, **options)
    finally:
        rotary.inv_freq = sound


def unscaled_embeddings(forward, text_model, embeds, *arguments, **options):
    return forward(text_model, embeds * 1.1, *arguments, **options)


def leak(forward, *arguments, context, **options):
    context.__class__ = Leaking
    return forward(*arguments, context=context, **options)


def no_deepstack(forward, text_model, embeds, positions, image_positions, deepstack, **options):
    return forward(text_model, embeds, positions, image_positions, deepstack[:0], **options)


def late_deepstack(forward, text_model, embeds, positions, image_positions, deepstack, **options):
    return forward(text_model, embeds, positions, image_positions, deepstack[::-1], **options)


def shifted_images(forward, text_model, embeds, positions, image_positions, deepstack, **options):
    if image_positions is not None:
        deepstack = [layer.roll(1, 0) for layer in deepstack]
    return forward(text_model, embeds, positions, image_positions, deepstack, **options)


def swapped_projections(self, *arguments, **options):
    self.k_proj, self.v_proj = self.v_proj, self.k_proj
    try:
        return layers.attention_forward(self, *arguments, **options)
    finally:
        self.k_proj, self.v_proj = self.v_proj, self.k_proj


def swapped_gate(self, x, **_):
    return self.down_proj(torch.nn.functional.silu(self.up_proj(x)) * self.gate_proj(x))


def norm_without_weight(self, x):
    return layers.norm_forward(self, x) / self.weight


def bidirectional_tower(encode, tower, patches, grids, dtype):
    # One frame of all images: their patches see each other.
    context = frame_attention(np.array([[1, 1, len(patches)]]), patches.device, dtype)
    out = tower(patches, grid_thw=torch.from_numpy(grids), context=context)
    return VisionFeatures(out.pooler_output, tuple(out.get("deepstack_features", ())))


def frames_see_each_other(encode, tower, patches, grids, dtype):
    # Each clip as one frame that is as high as all of its frames.
    heights = np.stack([grids[:, 0] ** 0, grids[:, 0] * grids[:, 1], grids[:, 2]], axis=1)
    context = frame_attention(heights, patches.device, dtype)
    out = tower(patches, grid_thw=torch.from_numpy(grids), context=context)
    return VisionFeatures(out.pooler_output, tuple(out.get("deepstack_features", ())))


def detached_tower(encode, *arguments):
    features = encode(*arguments)
    return VisionFeatures(features.tokens.detach(), features.deepstack)


def reordered_images(encode, *arguments):
    features = encode(*arguments)
    return VisionFeatures(features.tokens.flip(0), features.deepstack)


def larger_windows(encode, tower, *arguments):
    sound = tower.window_size
    tower.window_size = 2 * sound
    try:
        return encode(tower, *arguments)
    finally:
        tower.window_size = sound


def leaking_state(self, hidden_states, **options):
    out = layers.delta_net_forward(self, hidden_states, **options)
    return out + 0.05 * out.roll(1, dims=1)


def forgotten_decay(self, hidden_states, **options):
    sound = self.A_log
    self.A_log = torch.nn.Parameter(sound + 0.1)
    try:
        return layers.delta_net_forward(self, hidden_states, **options)
    finally:
        self.A_log = sound


def unweighted_experts(self, hidden_states, *arguments, **options):
    from rlinf_vl.models.experts import experts_forward

    return 0.9 * experts_forward(self, hidden_states, *arguments, **options)


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


def nan_gradients(self, x, **options):
    return NanBackward.apply(layers.mlp_forward(self, x, **options))


def lost_weight(name, weight):
    return () if name.endswith("mlp.up_proj.weight") else ((name, weight),)


def mixed_up_weights(name, weight):
    changes = {"k_proj": "v_proj", "v_proj": "k_proj"}
    part = next((part for part in changes if f".{part}." in name), None)
    return ((name.replace(part, changes[part]) if part else name, weight),)


#: Fault → (family, how it is planted, paths that must find it).
FAULTS = {
    "placeholder count": ("qwen3_vl", lambda f: replace(f, image_processor=WrongCounts), ["packed"]),
    "height and width": ("qwen3_vl", with_positions(lambda p: p[[0, 1, 3, 2]]), ["positions", "packed", "torch engine"]),
    "positions of text": ("qwen3_vl", with_positions(lambda p: p[[0, 0, 0, 0]]), ["positions", "shared"]),
    "positions off by one": ("qwen2_5_vl", with_positions(late), ["positions", "tree"]),
    "rope base": ("qwen3", with_text(rope_base), ["packed", "torch engine"]),
    "unscaled embeddings": ("qwen3", with_text(unscaled_embeddings), ["packed"]),
    "leak between sequences": ("qwen3_vl", with_text(leak), ["packed", "shared", "tree"]),
    "no deepstack": ("qwen3_vl", with_text(no_deepstack), ["packed", "cached features"]),
    "deepstack in another order": ("qwen3_vl_moe", with_text(late_deepstack), ["packed"]),
    "deepstack shifted by a token": ("qwen3_vl", with_text(shifted_images), ["shared"]),
    "swapped projections": ("qwen2_5_vl", with_layer("VLAttention", swapped_projections), ["packed", "lora"]),
    "swapped gate": ("qwen3", with_layer("MLP", swapped_gate), ["packed"]),
    "gradients that are no numbers": ("qwen3", with_layer("MLP", nan_gradients), ["packed", "checkpointing"]),
    "norm without weight": ("qwen3_vl", with_layer("RMSNorm", norm_without_weight), ["packed"]),
    "images see each other": ("qwen3_vl", with_images(bidirectional_tower), ["packed", "torch engine"]),
    "tower without gradients": ("qwen3_5", with_images(detached_tower), ["packed"]),
    "features in another order": ("qwen3_5", with_images(reordered_images), ["cached features"]),
    "times of frames": ("qwen2_5_vl", without_times, ["video"]),
    "frames see each other": ("qwen3_vl", with_images(frames_see_each_other), ["video"]),
    "windows of another size": ("qwen2_5_vl", with_images(larger_windows), ["packed"]),
    "state leaks": ("qwen3_5", with_layer("GatedDeltaNet", leaking_state), ["packed"]),
    "decay": ("qwen3_5_moe", with_layer("GatedDeltaNet", forgotten_decay), ["tree"]),
    "weights of experts": ("qwen3_vl_moe", with_layer("Experts", unweighted_experts), ["packed"]),
    "a weight lost in export": ("qwen3", lambda f: replace(f, engine_names=lost_weight), ["export"]),
    "weights mixed up in export": ("qwen3", lambda f: replace(f, engine_names=mixed_up_weights), ["export"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path):
    name, planted, paths = FAULTS[fault]
    found = outcomes(planted(FAMILIES[name]), tmp_path, *paths)
    assert {path: outcome.status for path, outcome in found.items()} == dict.fromkeys(
        paths, "wrong"
    )


class WindowOffByOne:
    """A context whose windows have a token more."""

    def __init__(self, context):
        self.context = context

    def attend(self, layer, q, k, v, scaling, window=None):
        return self.context.attend(layer, q, k, v, scaling, window and window + 1)


def longer_windows(forward, *arguments, context, **options):
    return forward(*arguments, context=WindowOffByOne(context), **options)


def embeddings_without_scale(forward, text_model, embeds, *arguments, **options):
    scale = text_model.get_input_embeddings().embed_scale
    return forward(text_model, embeds / scale, *arguments, **options)


def one_rope_base(forward, text_model, *arguments, **options):
    rotary = text_model.rotary_emb
    sound = rotary.sliding_attention_inv_freq
    rotary.sliding_attention_inv_freq = rotary.full_attention_inv_freq
    try:
        return forward(text_model, *arguments, **options)
    finally:
        rotary.sliding_attention_inv_freq = sound


#: Fault of Gemma 3 → (how it is planted, paths that must find it).
GEMMA_FAULTS = {
    "a window off by one": (with_text(longer_windows), ["packed", "shared", "tree", "torch engine"]),
    "images causal": (lambda f: replace(f, images_see_themselves=False), ["packed", "shared", "tree", "torch engine"]),
    "unscaled embeddings": (with_text(embeddings_without_scale), ["packed", "torch engine"]),
    "one rope base for all layers": (with_text(one_rope_base), ["packed", "torch engine"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma():
    config = AutoConfig.for_model("gemma3", **RELEASED["gemma3"])
    return member_of(family_at(config), config, ".")


@pytest.mark.slow
@pytest.mark.parametrize("fault", GEMMA_FAULTS)
def test_a_fault_planted_in_gemma_is_found(fault, gemma):
    planted, paths = GEMMA_FAULTS[fault]
    proofs = Proofs(replace(gemma, family=planted(gemma.family)))
    statuses = {o.path: o.status for o in outcomes_of(proofs, paths.__contains__)}
    assert statuses == dict.fromkeys(paths, "wrong")


def test_a_stale_feature_cache_is_found(monkeypatch, tmp_path):
    sound = VisionCache.get

    def stale(self, hashes):
        return sound(self, sorted(hashes))

    monkeypatch.setattr(VisionCache, "get", stale)
    (outcome,) = outcomes(FAMILIES["qwen3_vl"], tmp_path, "cached features").values()
    assert outcome.status == "wrong"


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_model_type_has_a_certificate(tmp_path, capsys):
    file = tmp_path / "certificate.json"
    command = ["prove-family", "qwen3", "--paths", "packed,cached_features", "--output", str(file)]
    assert main(command) == 0
    written = json.loads(file.read_text())
    assert written["proven"] and written["model_type"] == "qwen3"
    packed, cached = written["paths"]
    assert packed["status"] == "proven" and max(packed["figures"]) <= packed["limit"] == 1e-5
    assert (cached["status"], cached["reason"]) == ("refused", "no vision tower")
    assert written["member"]["num_hidden_layers"] == 2 and written["versions"]["transformers"]
    assert "packed" in (out := capsys.readouterr().out) and "refused: no vision tower" in out


def test_a_folder_is_proven_with_its_own_image_processor(toy_folder):
    assert main(["prove-family", str(toy_folder), "--paths", "shared"]) == 0


def test_a_wrong_family_ends_with_1(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from rlinf_vl.models.families.qwen3 import FAMILY as QWEN3\n"
        "FAMILY = replace(QWEN3, positions=lambda ids, grids, tokens: QWEN3.positions(ids, grids, tokens) * 2)\n"
    )
    command = ["prove-family", "qwen3", "--family", f"{file}:FAMILY", "--paths", "packed,export"]
    assert main(command) == 1
    assert "qwen3 is not computed as in transformers: packed\n" in capsys.readouterr().out


@pytest.mark.quick("internvl")
@pytest.mark.parametrize("name", [name for name in certificates() if name not in FAMILIES])
def test_a_certificate_that_comes_with_the_package_holds(name, tmp_path):
    """Its member, made anew from the config in the certificate: rows against transformers, and what the torch engine samples."""
    content = json.loads((FOLDER / f"{name}.json").read_text())
    config = AutoConfig.for_model(**content["member"])
    assert content["model_type"] == config.model_type == name
    proofs = Proofs(member_of(family_at(config), config, tmp_path))
    outcomes = list(
        outcomes_of(proofs, ("positions", "packed", "tree", "torch engine").__contains__)
    )
    statuses = {path["path"]: path["status"] for path in content["paths"]}
    assert [outcome.status for outcome in outcomes] == [statuses[o.path] for o in outcomes]
    assert content["proven"] == (not proven_wrong(name)) and not not_proven(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4v", "glm4v_moe"])
def test_a_model_type_has_its_checkpoints_rotation(name, capsys):
    assert main(["prove-family", name, "--paths", "positions"]) == 0
    assert "proven" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v"])
def test_a_tower_by_its_path_is_proven(name, tmp_path):
    """Families that are not in the table; GLM's checkpoints rotate half of a head."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
    if name == "glm4v":
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    AutoConfig.for_model(name, text_config={"rope_parameters": rope}).save_pretrained(tmp_path)
    command = ["prove-family", str(tmp_path), "--vision-tower", "model.visual"]
    command += ["--text-model", "model.language_model"]
    paths = "packed,shared,tree,cached features,checkpointing,lora,torch engine,export"
    assert main([*command, "--paths", paths]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qwen3_vll"], "transformers has no such model type; did you mean 'qwen3_vl'"),
        (["no/such/folder/at/all"], "checkpoint 'no/such/folder/at/all': "),
        (["paligemma"], "tokens of model.language_model attend to all later ones"),
        (["qwen3", "--paths", "pakced"], "--paths 'pakced': no such path; did you mean 'packed'?"),
        (["qwen2_vl", "--vision-tower", "model.visual"], "go together"),
        (["qwen3", "--family", "qwen3_vl"], "a family of your own is path/to/file.py:NAME"),
    ],
)
def test_mistakes_are_told(words, message, capsys):
    assert main(["prove-family", *words]) == 2
    assert message in capsys.readouterr().err


def test_paths_are_added_to_a_certificate(tmp_path, capsys):
    """With the member that is in it."""
    file = tmp_path / "certificate.json"
    assert main(["prove-family", "qwen3", "--paths", "packed", "--output", str(file)]) == 0
    written = json.loads(file.read_text())
    written["member"]["intermediate_size"] = 72
    written["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(written))
    command = ["prove-family", "qwen3", "--paths", "prompts,export", "--output", str(file)]
    assert main(command) == 0
    added = json.loads(file.read_text())
    assert [path["path"] for path in added["paths"]] == ["prompts", "packed", "export"]
    assert added["paths"][1] == written["paths"][0] and added["member"]["intermediate_size"] == 72
    assert added["paths"][2]["versions"]["torch"] == torch.__version__
    capsys.readouterr()
    assert main(["prove-family", "qwen3_vl", "--paths", "export", "--output", str(file)]) == 2
    assert "is the certificate of 'qwen3'; name another file" in capsys.readouterr().err
    file.write_text("{}")
    assert main(command) == 2
    assert "is no certificate" in capsys.readouterr().err
