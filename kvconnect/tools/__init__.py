"""What operators ask: ``doctor``, what will work; ``inspect``, what running workers hold, do and did."""
