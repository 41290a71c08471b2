"""Groups: several members share the messages of one stream.

The topics are spread over a fixed number of partitions. A member handles a partition while it holds the lease
of the partition. The position up to which a partition is handled is a hold of the cluster, so it outlives all
members.
"""
