#!/bin/sh
# Slurm's TaskProlog: each printed line `export NAME=VALUE` sets a variable of the task.
node=${PACELINE_NODE_DIRECTORY:-/dev/shm/paceline-$(hostname)}
echo "export PACELINE_RING_DIRECTORY=$node/rings"
echo "export PACELINE_NODE_DIRECTORY=$node"
echo "export PACELINE_JOB=slurm-${SLURM_JOB_ID:-0}"
# The first generation; restarts by torchrun count on from it.
echo "export PACELINE_GENERATION=$((100 * ${SLURM_RESTART_COUNT:-0}))"
