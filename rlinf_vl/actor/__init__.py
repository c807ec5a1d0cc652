"""The learner: an FSDP2 policy and reference on a Ray actor per rank, updates, and checkpoints."""
