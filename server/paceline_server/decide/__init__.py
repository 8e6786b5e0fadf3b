"""From findings and policy to incidents, actions and commands: pure."""
