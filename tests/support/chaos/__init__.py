"""Real clusters under random faults from a seed, with checks of what each process recorded."""
