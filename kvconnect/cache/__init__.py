"""The cache of a worker: specs, region tables, shards, token retention, and the identity of KV."""
