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
node=${PACELINE_NODE_DIRECTORY:-/dev/shm/paceline-$(hostname)}
rings=$node/rings
user=

if command -v systemctl >/dev/null 2>&1 && ! systemctl --quiet is-active "$agent"; then
    systemctl start "$agent" || logger -t paceline "job ${SLURM_JOB_ID:-?}: $agent does not start"
fi
command -v systemctl >/dev/null 2>&1 && user=$(systemctl show --property User --value "$agent")
# The ranks run as the job's user. Their rings belong to the agent's group, too (that is the 2 of
# 3777), and nobody removes another's.
mkdir -p "$rings" && chown "${user:-$(id -un)}:" "$node" "$rings" \
    && chmod 711 "$node" && chmod 3777 "$rings" \
    || logger -t paceline "job ${SLURM_JOB_ID:-?}: $rings cannot be made"
exit 0
