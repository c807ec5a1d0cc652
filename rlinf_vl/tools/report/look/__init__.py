"""The verb `look`: what recorded answers owe to their images."""
