"""The demo: proof on this machine that a pair decodes the same tokens as a single node.

Starts real processes through the command line, as an operator would, and judges them from outside, over HTTP.
"""
