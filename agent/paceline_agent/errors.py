"""The errors of the agent.

AgentError
├── SettingsError        an option or a combination of options is not valid
├── DirectoryInUseError  another agent uses this node's directory
├── UnsafeDirectoryError the node directory is another user's, or others may write to it
├── GuardLostError       the guard process, parent of the ranks, is gone
├── LinkError            the server did not respond, or not as a Paceline server
└── OutputError          standard output cannot be written
"""


class AgentError(Exception):
    """Base of the agent's errors; the message is one sentence that includes the fix."""


class SettingsError(AgentError):
    pass


class DirectoryInUseError(AgentError):
    pass


class UnsafeDirectoryError(AgentError):
    pass


class GuardLostError(AgentError):
    pass


class LinkError(AgentError):
    pass


class OutputError(AgentError):
    pass
