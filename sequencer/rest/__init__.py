"""The HTTP interface of a node: status, metrics, probes, and the actions of operators.

http     listener, connections, and the dispatcher: one access policy for the REST port and the gRPC tunnel
views    endpoints and actions (the lists of routes), the views that answer them, schemas, alarms, metrics
base     requests, parameters, bodies, errors, and the `NodeSnapshot` from which all views are made
page     the status page
"""
