"""Finding the cause of a failure: the op, the layer, the token, the commit."""
