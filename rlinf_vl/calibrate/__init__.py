"""The verb `calibrate`: measures what a machine does in a second with a config's model."""
