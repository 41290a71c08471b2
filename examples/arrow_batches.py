"""Reads a log as Arrow record batches, without a Python object for each message. Needs the extra `arrow`.

python examples/arrow_batches.py --path data/trades/sessions/feed1
"""

import argparse

import pyarrow as pa

import rt

parser = argparse.ArgumentParser(description="Count the messages of each topic.")
parser.add_argument("--path", default="data/trades/sessions/feed1", help="A session or a merged log.")
options = parser.parse_args()

with rt.LogReader(options.path) as log:
    table = pa.Table.from_batches([batch.to_arrow() for batch in log.batches()])
counts = table.group_by("topic").aggregate([("position", "count")])
for row in counts.to_pylist():
    print(row["topic"], row["position_count"])
