"""Input and output formats of the subcommands."""
