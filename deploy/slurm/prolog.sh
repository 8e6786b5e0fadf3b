#!/bin/sh
# Slurm's Prolog, as root on each node before a job: see that the node's agent runs, and say what the
# job's ranks are to be called. In slurm.conf:
#
#   Prolog=/etc/slurm/paceline-prolog.sh
#   Epilog=/etc/slurm/paceline-epilog.sh
#   TaskProlog=/etc/slurm/paceline-task-prolog.sh
#
# A node without its agent still trains: what is wrong here never drains a node, so the end is 0.
set -u
agent=${PACELINE_AGENT_UNIT:-paceline-agent.service}
rings=${PACELINE_NODE_DIRECTORY:-/dev/shm/paceline-$(hostname)}/rings

if command -v systemctl >/dev/null 2>&1 && ! systemctl --quiet is-active "$agent"; then
    systemctl start "$agent" || logger -t paceline "job ${SLURM_JOB_ID:-?}: $agent does not start"
fi
# The ranks run as the job's user; the agent reads what they write, nobody removes another's ring.
mkdir -p "$rings" && chmod 1777 "$rings" \
    || logger -t paceline "job ${SLURM_JOB_ID:-?}: $rings cannot be made"
exit 0
