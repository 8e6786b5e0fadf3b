#!/bin/sh
# Slurm's Prolog, run as root on each node before a job: starts the node's agent if it does not run,
# and prepares the directory for the ranks' rings. In slurm.conf:
#
#   Prolog=/etc/slurm/paceline-prolog.sh
#   Epilog=/etc/slurm/paceline-epilog.sh
#   TaskProlog=/etc/slurm/paceline-task-prolog.sh
#
# A node without an agent can still train, so this always exits with 0: an error would drain the node.
set -u
agent=${PACELINE_AGENT_UNIT:-paceline-agent.service}
node=${PACELINE_NODE_DIRECTORY:-/dev/shm/paceline-$(hostname)}
rings=$node/rings
user=

if command -v systemctl >/dev/null 2>&1 && ! systemctl --quiet is-active "$agent"; then
    systemctl start "$agent" || logger -t paceline "job ${SLURM_JOB_ID:-?}: $agent does not start"
fi
command -v systemctl >/dev/null 2>&1 && user=$(systemctl show --property User --value "$agent")
# The ranks run as the job's user. The 2 of 3777 gives their rings the agent's group; the 1 keeps
# users from removing the rings of others.
mkdir -p "$rings" && chown "${user:-$(id -un)}:" "$node" "$rings" \
    && chmod 711 "$node" && chmod 3777 "$rings" \
    || logger -t paceline "job ${SLURM_JOB_ID:-?}: $rings cannot be created"
exit 0
