"""A seeded simulator of whole deployments: every node, rank, peer and fault on one virtual clock.

The scheduler halves, the worker halves and the memory engine are the real ones. Simulated are the serving
stack around them, the device, the network, the clients and everything that goes wrong. One seed decides
all of it, so a run that breaks an invariant can be replayed event by event.
"""
