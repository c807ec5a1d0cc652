"""Models of the general path, which SGLang's schedulers import, and the ids they never sample.

SGLang ends where this package can't be imported. It only warns of a module within it.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from rlinf_vl.engines.sglang.bans import ban_in_sampling

ban_in_sampling(SamplingBatchInfo)
