#!/bin/bash

# Parameters
#SBATCH --chdir=@PROJECT@/runs/on-slurm/trials/0001
#SBATCH --comment='ccl-search run=on-slurm trial=1 by hand'
#SBATCH --export=ALL
#SBATCH --job-name=on-slurm-t0001-a1
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --time=30

# setup

# command
export SUBMITIT_EXECUTOR=slurm
exec @VENV@/bin/python @PROJECT@/runs/on-slurm/trials/0001/slurm-a1/node.py again @PROJECT@/runs/on-slurm/trials/0001/slurm-a1/payload.json
# which runs, by srun as one task on each of 1 nodes, for at most 1800 s:
#   CCL_ACTIVATION_CHECKPOINTING=none
#   CCL_CONFIG=@PROJECT@/runs/on-slurm/trials/0001/config.json
#   CCL_DP=1
#   CCL_MICRO_BATCH_SIZE=16
#   CCL_PP=1
#   CCL_TP=1
#   CCL_TRIAL_DIR=@PROJECT@/runs/on-slurm/trials/0001
#   CCL_ZERO_STAGE=0
#   GLOO_SOCKET_IFNAME=lo
#   OMP_NUM_THREADS=1
#   @VENV@/bin/python -m torch.distributed.run --nnodes=1 --node-rank=K --nproc-per-node=1 --master-addr=HEAD --master-port=PORT @SHIPPED@/launchers/cpu.py
