"""One step in several implementations, and where they part."""
