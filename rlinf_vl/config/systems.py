"""The other systems whose configs are recognised and converted (`rlinf_vl.tools.convert`)."""

#: Names on the command line, and names as the systems write them.
SYSTEMS = {"verl": "verl", "easyr1": "EasyR1", "trl": "TRL", "rlinf": "RLinf", "skyrl": "SkyRL"}
