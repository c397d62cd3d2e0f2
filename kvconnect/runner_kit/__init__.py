"""Parts for the model runner of a serving stack: kernel block sizes, block tables, zeroing, flex buffers."""
