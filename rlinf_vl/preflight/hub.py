"""Whether the Hugging Face hub has what a config names. Neither torch nor Ray is imported."""

import json
import logging
import os
import re
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@cache
def ask_hub(kind: str, name: str, cached: bool = False) -> tuple[str | None, str | None]:
    """(model_type of a model where it is known, why a name can't be had). Where the hub can't be reached and the cache has what is
    named, the run is told to do without the hub: transformers would ask six times for each of a dozen files."""
    import huggingface_hub as hub

    model_type = None
    try:
        if kind == "data set":
            hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
            return None, None
        if isinstance(config := hub.try_to_load_from_cache(name, "config.json"), str):
            cached, model_type = True, json.loads(Path(config).read_bytes()).get("model_type")
        found = hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return model_type or (found.config or {}).get("model_type"), None
    except hub.errors.HFValidationError:
        return None, "neither a folder here nor a name that the hub allows; write owner/name"
    except hub.errors.GatedRepoError:
        return None, "the hub asks for an agreement first; accept it on its page, then 'hf auth login'"
    except hub.errors.RepositoryNotFoundError:
        return None, f"the hub has no {kind} of that name, or a private one; check it, or 'hf auth login'"
    except Exception as error:  # the client's own, and those of the HTTP library that it was built with
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if cached:
            said = "%s: the hub can't be reached (%s); its copy in the cache is used (HF_HUB_OFFLINE=1)"
            log.warning(said, name, reason)
            os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes of a private cluster
            hub.constants.HF_HUB_OFFLINE = True  # for this one, which has read it
            return model_type, None
        fetch = f"hf download {name}" + (" --repo-type dataset --local-dir DIR" if kind == "data set" else "")
        return None, f"not in the cache here, and the hub can't be reached ({reason}); run '{fetch}' where it can"
