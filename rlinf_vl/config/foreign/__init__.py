"""Configs of other systems: read (`files`), converted (`convert`), written as ours."""
