"""Start, watch and stop the ranks of this node, as the server commands.

commands.py      the command stream, and what each command does
supervisor.py    the ranks of this node; talks to the guard
guard_link.py    the agent's end of the guard's socket
guard.py         a small process, parent of the ranks, which outlives a crashed agent
fork_server.py   forks the ranks of a restart with their modules already imported
"""
