"""What the command line says and asks: verbs, help, completion, and starts of a user's own files."""
