"""What can go wrong in the agent.

AgentError
├── SettingsError        the user asked for something impossible
├── DirectoryInUseError  another agent holds this node's directory
├── GuardLostError       the process that holds the ranks is gone
├── LinkError            the server could not be reached, or not understood
└── OutputError          what was asked for could not be printed
"""


class AgentError(Exception):
    """Base of all errors of the agent; its text is one sentence with the fix."""


class SettingsError(AgentError):
    pass


class DirectoryInUseError(AgentError):
    pass


class GuardLostError(AgentError):
    pass


class LinkError(AgentError):
    pass


class OutputError(AgentError):
    pass
