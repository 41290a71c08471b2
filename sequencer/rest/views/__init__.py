"""REST endpoints: resources, schemas, alarms, metrics."""
