"""Two workers talking: messages, a session without I/O, the side channel, keys, handles."""
