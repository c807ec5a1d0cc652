"""The embedded tasks, and the tiny checkpoints that are warm-started on their demonstrations."""
