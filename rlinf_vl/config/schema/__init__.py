"""Every configuration key of a run: one typed dataclass per section, and the allowed values of each
key.

The loader (`rlinf_vl.config.load`) fills these with the values that Hydra composes from YAML files,
and refuses a key that is not here. The string under a field is its documentation.
"""

from dataclasses import dataclass, field

from rlinf_vl.config.schema.actor import (
    ActorConfig,
    ActorModelConfig,
    FsdpConfig,
    LoraConfig,
    MixedPrecisionConfig,
    OptimConfig,
    VlmConfig,
)
from rlinf_vl.config.schema.algorithm import AlgorithmConfig, SamplingConfig
from rlinf_vl.config.schema.data import DataConfig
from rlinf_vl.config.schema.guidance import DistillationConfig, ImageCorruptionConfig, PapoConfig
from rlinf_vl.config.schema.limits import Limit
from rlinf_vl.config.schema.reward import RewardConfig
from rlinf_vl.config.schema.rollout import RolloutConfig
from rlinf_vl.config.schema.runner import ClusterConfig, RunnerConfig

__all__ = [
    "ActorConfig", "ActorModelConfig", "AlgorithmConfig", "ClusterConfig", "Config", "DataConfig",
    "DistillationConfig", "FsdpConfig", "ImageCorruptionConfig", "Limit", "LoraConfig", "MixedPrecisionConfig",
    "OptimConfig", "PapoConfig", "RewardConfig", "RolloutConfig", "RunnerConfig", "SCHEMA_NAME", "SamplingConfig", "VlmConfig",
]  # fmt: skip

#: An entry in the defaults list of a YAML file that marks it as a config of ours.
SCHEMA_NAME = "rlinf_vl_schema"


@dataclass
class Config:
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
