#!/bin/sh
# trial 3 of own: tp=2 dp=1 micro_batch_size=4 overlap=true
set -e
export CCL_CONFIG=@PROJECT@/searches/own/trials/0003/config.json
export CCL_DP=1
export CCL_MICRO_BATCH_SIZE=4
export CCL_OVERLAP=1
export CCL_TP=2
export CCL_TRIAL_DIR=@PROJECT@/searches/own/trials/0003
export MINE_BASE_S=0.1
export MINE_OVERLAP=True
exec @VENV@/bin/python @PROJECT@/launchers/mine.py
