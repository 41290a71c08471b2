"""What of a merged log is kept, and for how long. Pure: others list the segments, read clocks and trim.

units      sizes as people write them
policy     what is to be kept, and which of its rules is broken
retention  which sealed segments are to be trimmed, and why
"""
