"""For tests of rt and of programs that use it: disks that fail on demand, power cuts, virtual time."""
