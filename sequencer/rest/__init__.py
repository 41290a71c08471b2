"""What operators, probes and Prometheus ask a node over HTTP, and what operators have it do.

endpoints   what is read, and by whom          views, operating_views, log_history, alarms, metrics: how
actions     what is changed, by operators      body: what they may say; operations: who does it
answering   who may ask, and how much at once: the one policy of the REST port (app, listener) and the tunnel
openapi     the description of all of it       schemas, operating_schemas
page        the status page

Answers are made, pure, of a `NodeView`; `servers` looks at the node.
"""
