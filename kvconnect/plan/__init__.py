"""Pure: which bytes of one request go where."""
