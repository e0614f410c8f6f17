#!/bin/sh
# trial 4 of own: tp=1 dp=2 micro_batch_size=4 overlap=true
set -e
export CCL_CONFIG=@PROJECT@/searches/own/trials/0004/config.json
export CCL_DP=2
export CCL_MICRO_BATCH_SIZE=4
export CCL_OVERLAP=1
export CCL_TP=1
export CCL_TRIAL_DIR=@PROJECT@/searches/own/trials/0004
export MINE_BASE_S=0.1
export MINE_OVERLAP=True
exec @VENV@/bin/python @PROJECT@/launchers/mine.py
