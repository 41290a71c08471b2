"""Real clusters on one machine: nodes, processes, certificates, ports. For demo, benchmarks and tests."""
