#!/bin/bash
# A command of Slurm that kills the process which runs it at one moment: PACELINE_KILL has the
# moment, such as "before scontrol release". It is installed as scontrol, squeue and sinfo.
name=${0##*/}
moment="$name ${1}"
[ "$1" = update ] && moment="$name update ${2%%=*}"
strike() {
  if [ "$(cat "$PACELINE_KILL" 2>/dev/null)" = "$1 $moment" ]; then
    rm "$PACELINE_KILL"
    # The parent is `timeout`, its parent the server's process.
    kill -9 "$(ps -o ppid= -p "$PPID")"
  fi
}
strike before
"$PACELINE_SLURM_BIN/$name" "$@"
status=$?
strike after
exit $status
