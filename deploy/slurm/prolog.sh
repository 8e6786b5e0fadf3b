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
user=${user:-$(id -un)}

# Another user may have put a link or a directory of its own there first, so what exists is used only
# if it belongs to root or the agent, and is never changed. `mkdir` without -p creates, or fails.
is_ours() {
    case $(stat -c %U:%F "$1" 2>/dev/null) in
        "root:directory" | "$user:directory") true ;;
        *) false ;;
    esac
}

# The ranks run as the job's user. The 2 of 3777 gives their rings the agent's group; the 1 keeps
# users from removing the rings of others. The agent gets the directory last, once all is made.
create() {
    mkdir -m 700 "$node" && mkdir -m 700 "$rings" && chown "$user:" "$rings" \
        && chmod 3777 "$rings" && chmod 711 "$node" && chown "$user:" "$node"
} 2>/dev/null

are_ours() { is_ours "$node" && is_ours "$rings"; }

create || are_ours || { sleep 1; are_ours; } \
    || logger -t paceline "job ${SLURM_JOB_ID:-?}: $rings is not the agent's: remove $node"
exit 0
