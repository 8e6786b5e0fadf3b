#!/bin/sh
# Slurm's TaskProlog: each line `export NAME=VALUE` printed here is in the task's environment.
node=${PACELINE_NODE_DIRECTORY:-/dev/shm/paceline-$(hostname)}
echo "export PACELINE_RING_DIRECTORY=$node/rings"
echo "export PACELINE_NODE_DIRECTORY=$node"
echo "export PACELINE_JOB=slurm-${SLURM_JOB_ID:-0}"
# What torchrun restarts counts on from here.
echo "export PACELINE_GENERATION=$((100 * ${SLURM_RESTART_COUNT:-0}))"
