"""The memory that each phase of a step takes, layouts that fit, and hours as a range."""
