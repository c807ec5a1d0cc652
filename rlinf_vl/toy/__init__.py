"""The embedded task: drawings and the tiny checkpoint that answers them."""
