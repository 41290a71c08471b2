"""Real clusters under faults that a seed draws, with checks of what each process recorded."""
