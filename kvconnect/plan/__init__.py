"""Pure functions and values: the plan of which bytes of a request go where. No I/O and no clock."""
