#!/bin/sh
# Make the tokens that are not there yet, each in a file of its name below the given directory,
# and the agent's as a line of its configuration.
set -eu
directory=${1:?usage: create-tokens.sh DIRECTORY}
umask 077
mkdir -p "$directory"

create() {
    if [ ! -s "$directory/$1" ]; then
        # Whole or not at all: the secret is shown only once, and only its hash is kept. A name is
        # never used twice, so one whose secret was lost gets a successor.
        paceline server token create --name "$1-$(date +%Y%m%d%H%M%S)" --scope "$2" \
            >"$directory/$1.new"
        mv "$directory/$1.new" "$directory/$1"
    fi
}

create agent agent
create operator operator
printf 'token = "%s"\n' "$(cat "$directory/agent")" >"$directory/agent.toml"
