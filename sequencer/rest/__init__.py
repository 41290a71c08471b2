"""What operators, probes and Prometheus ask a node over HTTP.

`endpoints` lists what is answered and to whom; `views` and `log_history` make the answers, pure, of a
`NodeView`; `listener` and `app` are the edge.
"""
