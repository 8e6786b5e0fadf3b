#!/bin/sh
# Create the missing tokens, each in a file with its name in the given directory, and write the
# agent's token as a line of its configuration.
set -eu
directory=${1:?usage: create-tokens.sh DIRECTORY}
umask 077
mkdir -p "$directory"

create() {
    if [ ! -s "$directory/$1" ]; then
        # Complete or not at all: the secret is shown only once, and only its hash is stored. Names
        # are unique, so a token whose secret was lost is replaced by one with another name.
        paceline server token create --name "$1-$(date +%Y%m%d%H%M%S)" --scope "$2" \
            >"$directory/$1.new"
        mv "$directory/$1.new" "$directory/$1"
    fi
}

create agent agent
create operator operator
printf 'token = "%s"\n' "$(cat "$directory/agent")" >"$directory/agent.toml"
