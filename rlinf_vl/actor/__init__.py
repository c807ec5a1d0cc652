"""The learner: an FSDP2 policy and reference on one Ray actor per rank, the update step, and checkpoints."""
