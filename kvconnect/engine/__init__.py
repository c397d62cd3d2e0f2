"""The seam over transfer libraries, and the only place that imports them."""
