"""What runs processes and keeps files: launch, cluster, signals, the folder of a run."""
