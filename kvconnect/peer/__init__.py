"""The protocol between two workers: messages, a session without I/O, the side channel, keys, handles."""
