"""The interface to transfer libraries, and the only place that imports them."""
