"""HTTP servers: listener, connections, dispatcher, gRPC tunnel."""
