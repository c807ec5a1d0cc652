"""`train --multirun`: several runs of one config, resumed as a whole."""
