"""The two halves of the connector, which a serving stack calls.

`building` makes the scheduler half and the worker half from the parts that a role needs.
"""
