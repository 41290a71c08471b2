"""Value types of stream agents: ids, batches, errors, counters. No I/O."""
