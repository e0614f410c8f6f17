#!/bin/bash

# Parameters
#SBATCH --chdir=@PROJECT@/runs/cut-off/trials/0001
#SBATCH --comment='ccl-search run=cut-off trial=1 by hand'
#SBATCH --export=ALL
#SBATCH --job-name=cut-off-t0001-a1
#SBATCH --no-requeue
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --time=30

# setup

# command
export SUBMITIT_EXECUTOR=slurm
exec @VENV@/bin/python @PROJECT@/runs/cut-off/trials/0001/slurm-a1/node.py again @PROJECT@/runs/cut-off/trials/0001/slurm-a1/payload.json
# which runs, by srun as one task on each of 4 nodes, for at most 1800 s:
#   CCL_CONFIG=@PROJECT@/runs/cut-off/trials/0001/config.json
#   CCL_DP=2
#   CCL_MICRO_BATCH_SIZE=4
#   CCL_PP=1
#   CCL_TP=2
#   CCL_TRIAL_DIR=@PROJECT@/runs/cut-off/trials/0001
#   QUICK_SECONDS=300
#   @VENV@/bin/python @PROJECT@/launchers/quick.py
