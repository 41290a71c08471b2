"""The replicated state machine: state, commands, apply. Pure."""
