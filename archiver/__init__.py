"""The retention policy of a merged log. Pure: callers list the segments, read clocks and disks, and trim.

policy     the limits, and by how much each is exceeded
retention  the sealed segments to trim, and the reason
"""
