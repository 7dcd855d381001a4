"""A channel larger than a disk: samples in tar shards, read by an index in any order."""
