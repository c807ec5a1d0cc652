"""Tools that look at configs, data, machines and runs; none imports another."""
