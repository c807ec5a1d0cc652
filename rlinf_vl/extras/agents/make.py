"""Makes the player of a config's agent, which a worker asks for where `rollout.agent` is set."""

from collections.abc import Callable

from rlinf_vl.config import Config
from rlinf_vl.config.hubs import VERIFIERS_AGENT
from rlinf_vl.extras.agents.drivers import AgentDriver, CommandDriver, FunctionDriver
from rlinf_vl.extras.agents.function_driver import ProcessFunctionDriver
from rlinf_vl.extras.agents.player import AgentPlayer
from rlinf_vl.extras.agents.session import AgentLimits
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.group_player import EpisodeSettings, ScoreAnswers


def make_player(
    config: Config,
    client: GenerationClient,
    settings: EpisodeSettings,
    scorer: ScoreAnswers,
    first_report: Callable[[str], bool],
) -> AgentPlayer:
    """Return the player of the config's agent, whose endpoint listens.

    Args:
        scorer: pays answers by the run's reward functions.
        first_report: returns whether a fault is the first of its kind, and is to be logged.
    """
    agent, files = config.rollout.agent, config.runner.code_files
    bounds = (config.reward.reward_min_val, config.reward.reward_max_val)
    driver: AgentDriver
    host = "127.0.0.1"
    if agent.app is not None:
        # httpx, which agents of this host need not have.
        from rlinf_vl.extras.agents.app_driver import AppDriver, address_towards

        # An app may be on another machine, and calls the policy from there.
        driver = AppDriver(agent.app, agent.timeout, bounds)
        host = address_towards(agent.app)
    elif agent.command:
        driver = CommandDriver(agent.command, agent.timeout, agent.memory_gb)
    else:
        function = agent.function or VERIFIERS_AGENT
        if config.cluster.backend == "local":
            # In this process, for breakpoints.
            driver = FunctionDriver(function, files, ThreadExecutor(agent.timeout))
        else:
            processes = max(1, config.rollout.env_processes)
            driver = ProcessFunctionDriver(function, files, agent.timeout, processes)
    max_calls = min(agent.max_calls, config.rollout.max_turns or agent.max_calls)
    limits = AgentLimits(
        max_calls, config.runner.seq_length, agent.allow_sampling, video=config.data.video
    )
    player = AgentPlayer(
        client,
        settings,
        driver,
        limits,
        bounds,
        host=host,
        score_answers=scorer,
        first_report=first_report,
    )
    # Now: a server that can't listen is no fault of the first rows.
    player.endpoint.bind()
    return player
