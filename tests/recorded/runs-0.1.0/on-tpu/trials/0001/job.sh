#!/bin/bash
# trial 1 of on-tpu: tp=1 dp=2 ep=1 micro_batch_size=8 activation_checkpointing=none
export CCL_ACTIVATION_CHECKPOINTING=none
export CCL_DP=2
export CCL_EP=1
export CCL_MICRO_BATCH_SIZE=8
export CCL_TP=1
export OMP_NUM_THREADS=1
exec @VENV@/bin/python "$(dirname "$0")"/scripts/jax_cpu.py
