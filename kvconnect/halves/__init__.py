"""What a serving stack calls.

The scheduler half and the worker half, made by `building` of the parts that a role asks for.
"""
