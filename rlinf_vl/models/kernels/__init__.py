"""The parts that layers are made of (norm, rotation, gate, projections), a module for each kind of device with the same names."""
