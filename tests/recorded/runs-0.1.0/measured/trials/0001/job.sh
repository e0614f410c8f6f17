#!/bin/sh
# trial 1 of measured: tp=1 dp=2 pp=1 micro_batch_size=8 activation_checkpointing=none zero_stage=0
set -e
export CCL_ACTIVATION_CHECKPOINTING=none
export CCL_CONFIG=@PROJECT@/runs/measured/trials/0001/config.json
export CCL_DP=2
export CCL_MICRO_BATCH_SIZE=8
export CCL_PP=1
export CCL_TP=1
export CCL_TRIAL_DIR=@PROJECT@/runs/measured/trials/0001
export CCL_ZERO_STAGE=0
export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1
exec @VENV@/bin/python @SHIPPED@/launchers/cpu.py
