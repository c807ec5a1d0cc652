"""Web pages as environments."""
