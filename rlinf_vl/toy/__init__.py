"""The embedded tasks: what each asks and demonstrates, and the tiny checkpoint that is warm-started on that."""
