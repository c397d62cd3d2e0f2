"""What bytes exist: specs, region tables, shards, which tokens are still needed, and what KV depends on."""
