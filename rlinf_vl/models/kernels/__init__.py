"""Parts of layers (norm, rotation, gate, projections): a module for each kind of device, same
names."""
