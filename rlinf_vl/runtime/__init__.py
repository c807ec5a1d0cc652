"""Processes and files of a run: launch, cluster, signals, the folder of a run."""
