"""Build a run's trainer from its config: read the models, and make their collators."""

import logging

import torch
import torch.distributed as dist

from rlinf_vl.actor import expert_sharding
from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.actor.trainer import TeacherSource, Trainer
from rlinf_vl.algorithms.losses import takes_six_arguments
from rlinf_vl.config.processing import processor_options
from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.algorithm import LOSSES
from rlinf_vl.config.schema.guidance import SELF
from rlinf_vl.errors import RunError
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import Processor
from rlinf_vl.models.shards import Shards, load_shards
from rlinf_vl.packing.collator import Collator
from rlinf_vl.user_code import is_code, load_code

log = logging.getLogger(__name__)
#: The remark on a loss in the form of former releases.
SIX_ARGUMENTS = (
    "algorithm.loss_type: %s takes six arguments; from 0.2 on, a loss takes one, with every value "
    "of a token: loss(inputs), inputs.logprobs … (rlinf_vl.algorithms.LossInputs)"
)
#: (height, width) of images whose grids a teacher must make like the policy: tiny to large, since
#: image processors enlarge and shrink to limits of their own, and one that is long and narrow.
SIZES = [(28, 28), (224, 224), (480, 640), (1080, 1920), (3000, 200)]


def load_trainer(config: Config, model_path: str, mesh: Mesh, total_steps: int) -> Trainer:
    """Load the trainer of a run.

    The policy and reference are read from `model_path`, teachers from where
    `algorithm.distillation` says. Collective.

    Raises:
        RunError: a teacher has other tokens or image grids than the policy.
    """
    max_tokens = config.runner.max_tokens_per_mbs
    load_policy, collate_policy, processor = _model(
        config, model_path, config.rollout.model.model_type, mesh
    )
    distillation, teachers = config.algorithm.distillation, list[TeacherSource]()
    for path, labels in distillation.labels_by_path.items():
        if path == SELF:
            teachers.append(TeacherSource(load_policy, collate_policy, labels))
            continue
        load_teacher, collate_teacher, teacher_processor = _model(config, path, "auto", mesh)
        _check_teacher(f"{distillation.key_of(path)}: {path}", processor, teacher_processor)
        teachers.append(TeacherSource(load_teacher, collate_teacher, labels))
    loss_name, loss = config.algorithm.loss_type, None
    if is_code(loss_name):
        loss = load_code(
            loss_name, {}, config.runner.code_files, kind=LOSSES.kind, signature=LOSSES.signature
        )
        if takes_six_arguments(loss) and dist.get_rank() == 0:
            log.warning(SIX_ARGUMENTS, loss_name)
    return Trainer(
        load_policy,
        collate_policy,
        mesh,
        config.actor,
        config.algorithm,
        max_tokens=max_tokens,
        total_steps=total_steps,
        loss=loss,
        teachers=teachers,
    )


def _model(config: Config, path: str, model_type: str, mesh: Mesh):
    """Return the function that reads the model at `path`, its collator and its processor."""
    rollout, actor, files = config.rollout.model, config.actor, config.runner.code_files
    family = family_of(model_type, path, rollout.trust_remote_code, actor.model.vlm.paths, files)
    processor = Processor(path, family, **processor_options(config))

    # Quantization needs whole weights, and every rank has all of them.
    is_quantized = actor.model.is_lora and actor.model.lora.quantization != "none"

    def load(dtype: torch.dtype) -> PolicyModel:
        shards: Shards = {}
        if mesh.shards_weights and not is_quantized:
            experts = mesh.experts
            model, shards = load_shards(
                path,
                family,
                dtype,
                mesh.sharding,
                experts=None if experts is None else expert_sharding.reading_order(experts),
                trust_remote_code=rollout.trust_remote_code,
            )
        else:
            model = load_model(path, family, dtype, trust_remote_code=rollout.trust_remote_code)
        # No engine samples these, so they have no probability in training either.
        banned = processor.banned_ids(vocab_size(model))
        temperature = config.algorithm.sampling_params.temperature
        if config.data.messages_key is not None:
            # What is imitated was not sampled: the loss is that of the plain softmax.
            banned[:] = False
            temperature = 1.0
        policy = PolicyModel(model, family, banned, temperature=temperature)
        policy.shards = shards
        return policy

    collate = Collator(
        family=family,
        image_tokens=processor.image_tokens,
        pixels=processor.pixels,
        pad_id=processor.pad_id,
        pad_to=None if actor.model.variable_seq_lengths else config.runner.max_tokens_per_mbs,
    )
    return load, collate, processor


def _check_teacher(setting: str, policy: Processor, teacher: Processor) -> None:
    """Raise RunError unless a teacher reads the policy's ids and images as they are.

    `setting` is the config key that names it, with its value.
    """
    policy_ids, teacher_ids = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if policy_ids != teacher_ids:
        # One token that differs says more than how many do.
        token = next(
            token
            for token in (*policy_ids, *teacher_ids)
            if policy_ids.get(token) != teacher_ids.get(token)
        )
        raise RunError(
            f"{setting} has another tokenizer than the policy: {token!r} is "
            f"{teacher_ids.get(token, 'no token')} there and {policy_ids.get(token, 'no token')} "
            "here; take a teacher of the policy's family"
        )
    for height, width in SIZES if policy.family.vision_tower else ():
        if teacher.family.vision_tower is None:
            raise RunError(
                f"{setting} reads no images, and the policy does; take a vision-language model"
            )
        policy_grid = policy.image_processor.grid(height, width)
        teacher_grid = teacher.image_processor.grid(height, width)
        if teacher_grid != policy_grid:
            raise RunError(
                f"{setting} cuts an image of {width}×{height} pixels into {teacher_grid} patches, "
                f"the policy into {policy_grid}: their prompts differ; take a teacher with the "
                "policy's image processor"
            )
