"""The calls of one agent as a tree of sampled answers, from which its trajectory is made. No HTTP.

A call whose messages continue an earlier one, with its reply as that was returned, extends the ids
that were sampled. Any other call begins another branch: a retry, an edited or shortened history, a
sub-agent. Branches are sequences of the same trajectory:

    call 1 ── call 2 ── call 4          sequence 0: calls 1, 2 and 4
         └─── call 3 (an edited answer) sequence 1: call 3; call 1 is context there, without loss
    call 5 (a sub-agent)                sequence 2: call 5

Invariants:
- Each sampled token carries loss once, in the context in which it was sampled.
- An assistant's text that was not sampled in this session is context, and never trained on.
- The trajectory's distinct tokens, answers of running calls included, never exceed `seq_length`.
"""

import asyncio
import hashlib
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jinja2 import TemplateError

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.images import decode
from rlinf_vl.data.unusable import ImageError, RowError
from rlinf_vl.engines.base import EngineDied
from rlinf_vl.envs.call_forms import CallForm
from rlinf_vl.extras.agents.chat import ChatError, ChatRequest, Reply, reply_of
from rlinf_vl.extras.agents.first_calls import FirstCalls
from rlinf_vl.rollout.episode.faults import RolloutFault
from rlinf_vl.rollout.episode.generation_client import GenerationClient
from rlinf_vl.rollout.episode.loop_bridge import cancel_all
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.rollout.episode.rollout_state import RolloutState, random_stream
from rlinf_vl.types import (
    READ_CALLS,
    UNREAD_CALLS,
    ImageRef,
    Request,
    SamplingParams,
    TokenSequence,
)


@dataclass(eq=False)
class AgentCall:
    """A call that was accepted, and its answer.

    Attributes:
        parent: the call that it continues; None if it begins a conversation.
        observation: the messages after the parent's answer, or all.
        state: holds the request, and then the answer: one sequence and one turn.
        stream: names the random stream of its answer.
        on_trunk: whether it and all calls before it were the first to continue their parents.
        children: number of calls that continue it.
        prefill: ids with which its reply begins, int32 [n]; they are not sampled.
        reserved: tokens of the trajectory's limit that are set aside for it while it runs.
    """

    parent: "AgentCall | None"
    observation: Observation
    state: RolloutState
    stream: str
    on_trunk: bool
    children: int = 0
    prefill: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    reserved: int = 0

    def forget_messages(self) -> None:
        """Let go of the messages and images of a call that was refused."""
        self.observation = Observation((), ())
        self.state.request = self.state.completion = None

    @property
    def depth(self) -> int:
        """The number of answers before it in its conversation."""
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def sequence(self) -> TokenSequence:
        """Its prompt and answer."""
        return self.state.sequences[-1]

    @property
    def path(self) -> "list[AgentCall]":
        """The calls of its conversation, itself the last one."""
        return [*(self.parent.path if self.parent else ()), self]

    @property
    def answer(self) -> np.ndarray:
        """The ids of its reply, with what it had to begin with, int32 [R]."""
        return np.concatenate([self.prefill, self.state.answer])


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """The limits of an agent's calls.

    Attributes:
        max_calls: most calls of a trajectory.
        seq_length: most distinct tokens of a trajectory.
        allow_sampling: whether a call may choose its temperature and top_p.
        seq_length_key: what messages about `seq_length` call it.
        video: `data.video`, for videos that it sends.
    """

    max_calls: int
    seq_length: int
    allow_sampling: bool = False
    seq_length_key: str = "runner.seq_length"
    video: VideoConfig = field(default_factory=VideoConfig)


class AgentSession:
    """The session of one trajectory: answers its agent's calls with the engine.

    Attributes:
        state: the trajectory so far.
        images: the problem's images and clips and those that were sent, by address.
        video: how videos that are sent are sampled.
        failure: the error that ends the trajectory: the engine's, not the agent's.
        turn_of: reply id → number of its turn.
        last_reply: the text of the reply that was returned last; None before the first one.
        limit_reached: whether a call was refused because the trajectory is at its limit.
    """

    def __init__(
        self,
        state: RolloutState,
        sampling: SamplingParams,
        client: GenerationClient,
        limits: AgentLimits,
        first_calls: FirstCalls,
        place: int = 0,
    ) -> None:
        """`place` is the agent's place in its group."""
        self.state = state
        self.images = {image.url: image for image in state.problem.images}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.turn_of: dict[str, int] = {}
        self.last_reply: str | None = None
        self.limit_reached = False
        self.video = limits.video
        self._sampling, self._client, self._limits = sampling, client, limits
        self._first_calls, self._place = first_calls, place
        self._calls: list[AgentCall] = []
        #: Digest of a conversation up to an answer → the last call with this answer.
        self._answered: dict[bytes, AgentCall] = {}
        self._roots = 0
        self._running: set[AgentCall] = set()
        self._changed = asyncio.Event()  # set when a call has ended
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._closed = False
        self._pixels = {_pixel_digest(i): i.hash for i in state.problem.images}
        self._reencoded: set[str] = set()
        self._foreign_tokens = 0
        self._call_counts: Counter[str] = Counter()

    async def complete(self, chat: ChatRequest) -> Reply:
        """Answer a call.

        Raises:
            ChatError: it is refused, or the engine failed.
        """
        # A task of its own: what is sampled counts, also if the client has gone away.
        task = asyncio.ensure_future(self._complete(chat))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise _ended() from None
            raise

    def note_refusal(self) -> None:
        """Let the group's first calls wait for this agent no longer: it may never ask again."""
        self._first_calls.withdraw(self._place)

    async def close(self) -> None:
        """End the session: running calls are cancelled, and further ones refused."""
        self._closed = True
        await cancel_all(list(self._tasks))
        # The engine would keep their keys and values until memory is short.
        sessions = {call.state.session for call in self._calls} - {""}
        if sessions:
            self._client.engine.end_sessions(sorted(sessions))

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the session, by name: docs/agents.md has them."""
        answered = [call for call in self._calls if call.state.turns]
        resumed = sum(call.parent is not None for call in answered)
        return {
            "agent/calls": float(len(answered)),
            "agent/branches": float(max(0, len(self.state.sequences) - 1)),
            "agent/resumed_share": resumed / max(1, len(answered) - 1) if answered else 0.0,
            "agent/reencoded_images": float(len(self._reencoded)),
            "agent/foreign_assistant_tokens": float(self._foreign_tokens),
        } | {name: float(count) for name, count in self._call_counts.items()}

    async def _complete(self, chat: ChatRequest) -> Reply:
        if self._closed:
            raise _ended()
        if len(self._calls) >= self._limits.max_calls:
            self.limit_reached = True
            raise ChatError(
                f"this trajectory has made its {self._limits.max_calls} calls "
                "(rollout.agent.max_calls, rollout.max_turns)",
                code="max_calls_exceeded",
            )
        # Before anything is awaited: calls that are made at once get their streams in order.
        digests = _digests(chat)
        call = self._begin(chat, digests)
        try:
            await self._sample(call, chat)
            reply = await asyncio.to_thread(self._reply, call, chat)
            self._record(call, reply, digests, chat.parses_tools)
            # Only now: an agent that is refused again and again would fill the memory.
            self.images |= chat.new_images
        except BaseException:
            call.forget_messages()
            raise
        finally:
            # Not before the answer is recorded: its tokens would count nowhere meanwhile.
            self._running.discard(call)
            self._changed.set()
        return reply

    async def _sample(self, call: AgentCall, chat: ChatRequest) -> None:
        """Have a call's answer sampled. Raises ChatError, as `complete` does."""
        try:
            request = await asyncio.to_thread(self._request, call, chat)
            request = await self._with_room(call, request)
            await self._submit(call, request)
            await self._client.receive_reply(call.state)
        except ChatError:
            raise
        except (EngineDied, RolloutFault) as error:
            if not self.failure.done():
                self.failure.set_exception(error)
                self.failure.exception()  # read: nobody may wait for it
            raise ChatError(str(error), status=503) from error
        except (RowError, ImageError, ValueError) as error:
            raise ChatError(f"messages: {error}", param="messages") from error

    def _begin(self, chat: ChatRequest, digests: Sequence[bytes]) -> AgentCall:
        """Accept a call: find the call that it continues, and name its random stream."""
        # The longest conversation wins: it has the most sampled tokens.
        parent, start = None, 0
        for number in range(len(digests) - 1, 0, -1):
            # The conversation up to message `number - 1`, which must be a sampled answer.
            if (found_call := self._answered.get(digests[number])) is not None:
                parent, start = found_call, number
                break
        messages = chat.messages[start:]
        observation = Observation(messages, _images_of(messages, chat), chat.tools)
        siblings = parent.children if parent else self._roots
        on_trunk = siblings == 0 and (parent is None or parent.on_trunk)
        # The stream of a conversation without branches is that of an environment's turns.
        depth = parent.depth + 1 if parent else 0
        stream = str(depth) if on_trunk else f"{parent.stream if parent else ''}/{siblings}"
        session = self.state.session
        if siblings or not on_trunk:
            # Two calls of one engine's session at once would overwrite each other's cache.
            continues = parent is not None and not siblings
            session = parent.state.session if continues and parent else f"{session}/{stream}"
        state = RolloutState(self.state.problem, self.state.seed, self.state.group_seed, session)
        call = AgentCall(parent, observation, state, stream, on_trunk)
        if parent is None:
            self._roots += 1
        else:
            parent.children += 1
        self._calls.append(call)
        self._running.add(call)
        return call

    def _request(self, call: AgentCall, chat: ChatRequest) -> Request:
        """Build the request of a call, in a thread: rendering and images take milliseconds.

        Raises:
            ChatError, RowError, ImageError, ValueError: its messages make no prompt.
        """
        try:
            return self._rendered_request(call, chat)
        except (ChatError, RowError, ImageError, ValueError):
            raise
        except Exception as error:
            # Templates, tokenizers and processors raise anything for messages that they refuse.
            is_template = isinstance(error, TemplateError)
            reason = str(error) if is_template else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the checkpoint's chat template or processor refuses them: {reason}"
            ) from error

    def _call_form(self) -> CallForm:
        """Return the form of calls. Raises ChatError: the checkpoint's is not known."""
        try:
            return self._client.renderer.words.reply_form.require_calls()
        except ValueError as error:
            raise ChatError(f"tools: {error}", param="tools") from error

    def _rendered_request(self, call: AgentCall, chat: ChatRequest) -> Request:
        renderer, observation = self._client.renderer, call.observation
        if chat.parses_tools:
            self._call_form()
        for image in observation.images:
            self._note_image(image)
        for message in observation.messages:
            if message["role"] == "assistant":
                self._foreign_tokens += renderer.count_tokens(message["content"])
        if call.parent is None:
            images = observation.images
            ids, grids = renderer.prompt(observation.messages, images, observation.tools)
        else:
            path = call.path
            answers = [ancestor.answer for ancestor in path[:-1]]
            observations = [descendant.observation for descendant in path[1:]]
            turns = list(zip(answers, observations, strict=True))
            last_request = call.parent.state.request
            assert last_request is not None
            images = last_request.images + observation.images
            ids, grids = renderer.follow(call.parent.sequence.ids, path[0].observation, turns)
        if chat.requires_call:
            # The policy is made to begin with a call: nothing else can make sure that there is one.
            call.prefill = self._prefill(self._call_form().prefill(chat.required_tool or None))
            ids = np.concatenate([ids, call.prefill])
        seed = self.state.seed
        if call.stream != "0":
            seed = random_stream(seed, call.stream)
        sessions = (call.state.session,) if call.state.session else ()
        return Request(ids, images, grids, self._sampling_of(chat), (seed,), sessions)

    def _prefill(self, text: str) -> np.ndarray:
        """Return the ids with which a reply must begin. Raises ChatError: it can't begin so."""
        renderer = self._client.renderer
        prefill = renderer.encode(text)
        if not renderer.begins_with_thoughts:
            return prefill
        if self._client.budget is not None:
            raise ChatError(
                "tool_choice: no function can be required here, as the chat template begins each "
                "reply with thoughts, and rollout.thinking.budget limits them; use auto",
                param="tool_choice",
            )
        # A call within thoughts would be no call.
        return np.concatenate([renderer.closing, prefill])

    def _sampling_of(self, chat: ChatRequest) -> SamplingParams:
        """Return the sampling settings of a call. Raises ChatError: it may not choose them."""
        sampling = self._sampling
        for name in ("temperature", "top_p"):
            value = getattr(chat, name)
            if value is not None and value != getattr(sampling, name):
                if not self._limits.allow_sampling:
                    raise ChatError(
                        f"{name}: {value} is not the run's {getattr(sampling, name)}; leave it "
                        "out, or set rollout.agent.allow_sampling=true",
                        param=name,
                    )
                sampling = replace(sampling, **{name: float(value)})
        # A limit above the run's is lowered without a word: clients send large defaults.
        limit = sampling.max_new_tokens
        return replace(sampling, max_new_tokens=min(limit, chat.max_tokens or limit))

    async def _with_room(self, call: AgentCall, request: Request) -> Request:
        """Return the request with a limit of tokens that the trajectory has room for.

        Waits for running calls if their answers may take that room.

        Raises:
            ChatError: there is none.
        """
        placeholder_ids = self._client.renderer.processor.placeholder_ids
        limit = request.sampling.max_new_tokens
        while True:
            shared = self.state.shared_tokens(request, placeholder_ids)
            used = self.state.distinct_tokens + len(request.ids) - shared
            reserved = sum(running.reserved for running in self._running - {call})
            room = self._limits.seq_length - used - reserved
            # What is reserved may come free: answers are often shorter than they may be.
            if room >= limit or not reserved:
                break
            self._changed.clear()
            await self._changed.wait()
        if room < 1:
            self.limit_reached = True
            raise ChatError(
                # OpenAI's words, by which agents know that it is their context that is full.
                f"This model's maximum context length is {self._limits.seq_length} tokens "
                f"({self._limits.seq_length_key}); with these messages the trajectory has {used}",
                code="context_length_exceeded",
                param="messages",
            )
        max_new_tokens = min(limit, room)
        call.reserved = len(request.ids) - shared + max_new_tokens
        sampling = replace(request.sampling, max_new_tokens=max_new_tokens)
        return replace(request, sampling=sampling)

    async def _submit(self, call: AgentCall, request: Request) -> None:
        """Submit a call's request; the first one with the first ones of the group's others."""
        call.state.request = request
        if call is self._calls[0]:
            await self._first_calls.submit(self._place, call.state)
        else:
            (call.state.completion,) = self._client.submit([request])

    def _reply(self, call: AgentCall, chat: ChatRequest) -> Reply:
        """Return the reply to a call, and cut its answer where a stop text was written."""
        renderer, state = self._client.renderer, call.state
        decode_ids: Callable[[np.ndarray], str] = renderer.processor.decode
        # Engines know stop ids only; a text may begin and end within tokens.
        finish_reason = state.turns[-1].finish_reason
        text = decode_ids(call.answer)
        if ends := [text.index(stop) for stop in chat.stop if stop in text]:
            finish_reason = "stop"
            _cut_answer(call, chat.stop, decode_ids)
        thoughts = renderer.thoughts(call.answer)
        # Of the reply as it was cut, and with the marks that it had to begin with.
        sampled_thought = max(0, thoughts.tokens - len(call.prefill))
        state.turns[-1] = replace(state.turns[-1], thought=sampled_thought)
        reply_text = thoughts.reply
        if ends:
            stop_starts = [reply_text.index(stop) for stop in chat.stop if stop in reply_text]
            reply_text = reply_text[: min(stop_starts, default=len(reply_text))]
        tokens: list[tuple[str, bytes | None, float]] = []
        sequence, turn = call.sequence, state.turns[-1]
        if chat.logprobs and sequence.logprobs is not None:
            answer_ids = sequence.ids[turn.start : turn.end].tolist()
            logprobs = sequence.logprobs[turn.start : turn.end].tolist()
            for token_id, logprob in zip(answer_ids, logprobs, strict=True):
                text = renderer.token_text(token_id)
                tokens.append((text, renderer.token_bytes(token_id), logprob))
        return reply_of(
            f"chatcmpl-{secrets.token_hex(12)}",
            reply_text,
            renderer.thought_text(call.answer),
            "length" if finish_reason == "length" else "stop",
            (turn.start, turn.end - turn.start),
            tokens,
            self._call_form() if chat.parses_tools else None,
            chat.tools,
        )

    def _record(
        self, call: AgentCall, reply: Reply, digests: Sequence[bytes], parses_tools: bool
    ) -> None:
        """Add a call's answer to the trajectory, so that later calls can continue it."""
        self.turn_of[reply.id] = len(self.state.turns)
        turn, processor = call.state.turns[-1], self._client.renderer.processor
        self.state.add_turn(call.sequence, turn, processor, turn.start)
        self.last_reply = reply.text
        if parses_tools:
            self._call_counts[READ_CALLS] += reply.read_calls
            self._call_counts[UNREAD_CALLS] += reply.unread_calls
        # Of two calls with equal replies the later one is continued; tools' calls have ids.
        self._answered[_extended(digests[-1], reply.key)] = call

    def _note_image(self, image: ImageRef) -> None:
        """Count an image that shows the pixels of another one in other bytes."""
        known_hash = self._pixels.setdefault(_pixel_digest(image), image.hash)
        if known_hash != image.hash:
            self._reencoded.add(image.hash)


def _ended() -> ChatError:
    return ChatError("this trajectory has ended, and its key with it", status=401)


def _cut_answer(
    call: AgentCall, stops: Sequence[str], decode_ids: Callable[[np.ndarray], str]
) -> None:
    """Cut an answer behind the token that completes the first stop text.

    Exact: whether an answer ends there depends on the tokens up to there alone.
    """
    sequence, turn = call.sequence, call.state.turns[-1]

    def is_complete(end: int) -> bool:
        text = decode_ids(np.concatenate([call.prefill, sequence.ids[turn.start : end]]))
        return any(stop in text for stop in stops)

    # By bisection: a text that was written stays in every longer beginning of the answer.
    ends = range(turn.start + 1, turn.end)
    end = turn.start + 1 + bisect_left(ends, True, key=is_complete)
    arrays = {name: array[:end] for name, array in sequence.arrays().items()}
    columns = {name: arrays.pop(name) for name in sequence.columns}
    cut = TokenSequence(
        arrays["ids"],
        arrays["loss_mask"],
        arrays.get("logprobs"),
        arrays["versions"],
        sequence.images,
        columns,
    )
    call.state.sequences[-1] = cut
    call.state.turns[-1] = replace(turn, end=end, finish_reason="stop")


def _images_of(messages: Sequence[dict], chat: ChatRequest) -> tuple[ImageRef, ...]:
    """Return the images of messages in order, repeats included."""
    images = []
    for message in messages:
        content = message["content"]
        for part in content if isinstance(content, list) else ():
            if part["type"] != "text":
                images.append(chat.images[part[part["type"]]["url"]])
    return tuple(images)


def _digests(chat: ChatRequest) -> list[bytes]:
    """Return the digest of the conversation up to each message; `[0]` is of the tools alone."""
    digests = [hashlib.sha256(repr(chat.tools).encode()).digest()]
    for key in chat.keys:
        digests.append(_extended(digests[-1], key))
    return digests


def _extended(digest: bytes, key: str) -> bytes:
    return hashlib.sha256(digest + key.encode(errors="surrogatepass")).digest()


#: Hash of an image → digest of its pixels. Without the images: a cache of those would keep thousands.
_pixel_digests: dict[str, str] = {}
MAX_DIGESTS = 4096


def _pixel_digest(image: ImageRef) -> str:
    """Return a digest of an image's pixels; of its bytes if they can't be decoded."""
    digest = _pixel_digests.get(image.hash)
    if digest is None:
        try:
            picture = decode(image)
        except ImageError:
            return image.hash
        pixels = hashlib.blake2b(picture.tobytes(), digest_size=16)
        digest = f"{picture.size} {pixels.hexdigest()}"
        if len(_pixel_digests) >= MAX_DIGESTS:
            _pixel_digests.clear()
        _pixel_digests[image.hash] = digest
    return digest
