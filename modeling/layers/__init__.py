"""The layers of the model, each a module with parameters around the pure operations of `ops`."""
