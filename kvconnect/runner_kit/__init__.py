"""For serving stacks: kernel block sizes, block tables, zeroing, flex-attention capacity."""
