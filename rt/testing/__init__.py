"""For tests of programs that use rt: merged logs without nodes, and queries in virtual time."""
