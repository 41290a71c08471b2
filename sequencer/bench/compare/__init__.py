"""`rt bench compare`: rt beside other systems on this machine, measured alike.

bench             rounds of all systems in turn (`traffic`), one table at the end (`table`)
system            the contract of a compared system; `programs` runs its servers
rt_cluster, nats_jetstream, redis_streams, rabbitmq_streams
                  the systems: three servers each, and how clients publish and receive
"""
