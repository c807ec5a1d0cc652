"""The command line: verbs and their arguments, help, completion, and templates of a user's own
files."""
