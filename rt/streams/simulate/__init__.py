"""`python -m rt.streams.simulate`: clusters, hosts and streams in virtual time, by the product's code."""
