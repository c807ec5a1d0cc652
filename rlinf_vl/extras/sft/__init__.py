"""Imitation of conversations with pictures, by the loop of the controller."""
