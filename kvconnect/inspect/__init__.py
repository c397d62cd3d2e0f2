"""What a worker that runs holds and does, asked over its side channel, as tables."""
