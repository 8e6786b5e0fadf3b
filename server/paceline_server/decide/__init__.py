"""Pure functions that turn findings and policy into incidents, actions and commands."""
