#!/bin/sh
# Slurm's Epilog, run as root on each node after a job: removes the rings that its ranks left, which
# would use up the node's memory. The agent has read them: it detects a rank's end within a second.
set -u
rings=${PACELINE_NODE_DIRECTORY:-/dev/shm/paceline-$(hostname)}/rings
# Another user may have put a link there; `find` follows no link there or below.
if [ -n "${SLURM_JOB_ID:-}" ] && [ -d "$rings" ] && [ ! -L "${rings%/rings}" ]; then
    sleep "${PACELINE_EPILOG_SECONDS:-2}"
    find "$rings" -maxdepth 1 -type f -name "slurm-$SLURM_JOB_ID.g*.ring" -delete
fi
exit 0
