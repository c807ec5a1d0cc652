"""Ask the Hugging Face hub for the names in a config. Neither torch nor Ray is imported."""

import json
import logging
import os
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0


@cache
def ask_hub(kind: str, name: str, cached: bool = False) -> tuple[str | None, str | None]:
    """Return the model_type of a model, where it is known, and why the name can't be had, or None.

    Where the hub can't be reached and the cache has the model or data set, the run is set to do
    without the hub: transformers would ask six times for each of a dozen files.

    Args:
        kind: "model" or "data set".
        cached: whether the cache has the data set.
    """
    import huggingface_hub as hub

    model_type = None
    try:
        if kind == "data set":
            hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
            return None, None
        if isinstance(config := hub.try_to_load_from_cache(name, "config.json"), str):
            cached, model_type = True, json.loads(Path(config).read_bytes()).get("model_type")
        info = hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return model_type or (info.config or {}).get("model_type"), None
    except hub.errors.HFValidationError:
        return None, "neither a folder here nor a name that the hub allows; write owner/name"
    # Before RepositoryNotFoundError, of which this error is a kind.
    except hub.errors.GatedRepoError:
        return (
            None,
            "the hub asks for an agreement first; accept it on its page, then 'hf auth login'",
        )
    except hub.errors.RepositoryNotFoundError:
        return (
            None,
            f"the hub has no {kind} of that name, or a private one; check it, or 'hf auth login'",
        )
    # Errors of the client, and of the HTTP library that its version uses.
    except Exception as error:
        # The first line names the cause; the others are the client's advice.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if cached:
            message = "%s: the hub can't be reached (%s); its copy in the cache is used (HF_HUB_OFFLINE=1)"
            log.warning(message, name, reason)
            os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes of a private cluster
            hub.constants.HF_HUB_OFFLINE = True  # for this one, which has read it
            return model_type, None
        fetch = f"hf download {name}" + (
            " --repo-type dataset --local-dir DIR" if kind == "data set" else ""
        )
        return (
            None,
            f"not in the cache here, and the hub can't be reached ({reason}); run '{fetch}' where "
            "it can",
        )
