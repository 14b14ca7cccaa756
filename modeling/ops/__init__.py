"""Pure tensor operations: static shapes, no branches on data, state in and state out, rank at most 4."""
