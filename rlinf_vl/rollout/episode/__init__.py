"""From a row to a graded `Group`: prompts, episodes, environments, fault handling; no Ray."""
