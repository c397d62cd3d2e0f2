"""The demo: proof on this machine that a pair decodes the same tokens as a single node.

Starts real processes through the command line, exactly as an operator would, and judges them from
outside, over HTTP. ``children`` owns the processes, ``prompts`` what is asked, ``http`` how, ``outcome`` what
is right, ``pair`` one engine with one model, ``runner`` all of them, ``report`` what is printed; ``offload``
is a part of its own, with one node.
"""
