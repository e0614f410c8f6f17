#!/bin/sh
# trial 2 of own: tp=2 dp=1 micro_batch_size=1 overlap=false
set -e
export CCL_CONFIG=@PROJECT@/searches/own/trials/0002/config.json
export CCL_DP=1
export CCL_MICRO_BATCH_SIZE=1
export CCL_OVERLAP=0
export CCL_TP=2
export CCL_TRIAL_DIR=@PROJECT@/searches/own/trials/0002
export MINE_BASE_S=0.1
export MINE_OVERLAP=False
exec @VENV@/bin/python @PROJECT@/launchers/mine.py
