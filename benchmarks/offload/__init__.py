"""What blocks cost on their way to host memory and back.

``copies`` are both directions beside a contiguous copy and one copy per page, ``decode`` a model's steps
beside copies that go on all the time; ``runner`` reports.
"""
