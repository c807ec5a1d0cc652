"""Agents that drive themselves: they call a chat endpoint, and what it sampled is trained on.

`contract` has what a user's agent gets and returns, `chat` the form of OpenAI's requests and
replies, `endpoint` the server, and `drivers` run functions and commands. `rlinf_vl.rollout` has
the rest: `agent_session` extends the sampled tokens call by call, `agent_player` plays groups.
"""

from rlinf_vl.extras.agents.contract import AgentResult, AgentTask

__all__ = ["AgentResult", "AgentTask"]
