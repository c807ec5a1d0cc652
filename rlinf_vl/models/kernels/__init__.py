"""The parts of layers: a module for each kind of device, with the same names."""
