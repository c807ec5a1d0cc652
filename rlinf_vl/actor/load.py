"""The trainer of a run from its config: which models it reads, and what makes their micro-batches."""

import torch

from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.actor.trainer import Teacher, Trainer
from rlinf_vl.code import is_code, load_code
from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.algorithm import LOSSES
from rlinf_vl.errors import RunError
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import Processor
from rlinf_vl.packing.collator import Collator

#: (height, width) of images whose grids a teacher must make like the policy.
SIZES = ((28, 28), (224, 224), (480, 640), (1080, 1920), (3000, 200))


def load_trainer(config: Config, model_path: str, mesh: Mesh, total_steps: int) -> Trainer:
    """The trainer of a run, its models read from `model_path`, a teacher from `algorithm.distillation.teacher_path`. Collective.

    Raises:
        RunError: the teacher has other tokens or image grids than the policy.
    """
    max_tokens = config.runner.max_tokens_per_mbs
    load, collate, processor = _model(config, model_path, config.rollout.model.model_type)
    teacher: Teacher | None = None
    if (path := config.algorithm.distillation.teacher_path) is not None:
        load_teacher, teaches, other = _model(config, path, "auto")
        _check_alike(path, processor, other)
        teacher = load_teacher, teaches
    name, loss = config.algorithm.loss_type, None
    if is_code(name):
        loss = load_code(name, {}, config.runner.code_files, kind=LOSSES.what, signature=LOSSES.signature)
    models, settings = (load, collate, mesh), (config.actor, config.algorithm)
    return Trainer(*models, *settings, max_tokens=max_tokens, total_steps=total_steps, loss=loss, teacher=teacher)


def _model(config: Config, path: str, model_type: str):
    """What reads the model at `path`, the collator for it, and its processor."""
    rollout, actor, files = config.rollout.model, config.actor, config.runner.code_files
    family = family_of(model_type, path, rollout.trust_remote_code, actor.model.vlm.paths, files)
    processor = Processor(
        path,
        family,
        min_pixels=config.data.image_min_pixels,
        max_pixels=config.data.image_max_pixels,
        trust_remote_code=rollout.trust_remote_code,
    )

    def load(dtype: torch.dtype) -> PolicyModel:
        model = load_model(path, family, dtype, trust_remote_code=rollout.trust_remote_code)
        banned = processor.banned_ids(vocab_size(model))
        temperature = config.algorithm.sampling_params.temperature
        return PolicyModel(model, family, banned, temperature=temperature, chunk=actor.logprob_chunk_tokens)

    collate = Collator(
        family=family,
        image_token_id=processor.image_token_id,
        merge_size=processor.merge_size,
        pixels=processor.pixels,
        pad_id=processor.pad_id,
        pad_to=None if actor.model.variable_seq_lengths else config.runner.max_tokens_per_mbs,
        share_prompts=actor.share_prompts,
    )
    return load, collate, processor


def _check_alike(path: str, policy: Processor, teacher: Processor) -> None:
    """Raise RunError unless a teacher reads the policy's ids and images as they are."""
    key = f"algorithm.distillation.teacher_path: {path}"
    ours, theirs = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if ours != theirs:
        token = next(token for token in (*ours, *theirs) if ours.get(token) != theirs.get(token))
        raise RunError(
            f"{key} has another tokenizer than the policy: {token!r} is {theirs.get(token, 'no token')} there and "
            f"{ours.get(token, 'no token')} here; take a teacher of the policy's family"
        )
    for height, width in SIZES if policy.family.vision_tower else ():
        if teacher.family.vision_tower is None:
            raise RunError(f"{key} reads no images, and the policy does; take a vision-language model")
        if (grids := tuple(p.image_processor.grid(height, width) for p in (policy, teacher)))[0] != grids[1]:
            raise RunError(
                f"{key} cuts an image of {width}×{height} pixels into {grids[1]} patches, the policy into {grids[0]}: their prompts "
                "differ; take a teacher with the policy's image processor"
            )
