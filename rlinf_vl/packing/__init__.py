"""Packing of trajectories: micro-batches are planned (`planner`) and built as rows (`collator`)."""
