#!/usr/bin/env bash
# A run on the nodes of a Slurm job. Submit it from the repository, on a disk that all nodes see:
#
#   sbatch examples/launchers/slurm.sh [CONFIG [hydra overrides…]]
#   sbatch --nodes=4 --time=48:00:00 examples/launchers/slurm.sh qwen3-vl-2b-grpo-fsdp-geo3k runner.max_steps=500
#
#SBATCH --job-name=rlinf_vl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#
# 300 s before its time is up, or when it is preempted, the run writes a checkpoint and ends; requeued, it goes on from there.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch, from the repository}"
config="${1:-qwen3-vl-2b-grpo-fsdp-geo3k}"

# One file and one token for each start of the job: a head of an earlier start is nobody's.
mkdir -p results
export RAY_HEAD_FILE="$PWD/results/.ray-head-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
export WORLD_SIZE="$SLURM_NNODES"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" # srun does not take it from sbatch
if ((${SLURM_GPUS_ON_NODE:-0})); then
    wanted=($((SLURM_NNODES * SLURM_GPUS_ON_NODE)))
else
    wanted=($((SLURM_NNODES * SLURM_CPUS_ON_NODE)) --cpu)
fi
# shellcheck disable=SC2016  # SLURM_PROCID is each task's own
srun bash -c 'RANK="$SLURM_PROCID" exec bash ray_utils/launch.sh "$@"' launch "${wanted[@]}" -- \
    bash examples/reasoning/run_main_grpo_vqa.sh "$config" \
    "cluster.num_nodes=$SLURM_NNODES" runner.resume_dir=auto runner.grace_period=270 "${@:2}"
