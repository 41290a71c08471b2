"""The subcommands of `rt`."""
