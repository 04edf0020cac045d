"""Messages are equal after a round trip over the wire, and invalid ones are refused by name."""

from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.channel import MAX_MESSAGE_BYTES
from wire import cluster_pb2 as pb
from wire.check_prompt import check_params, check_prompt
from wire.convert import (
    describe_prompt,
    description_from_pb,
    description_to_pb,
    load_from_pb,
    load_to_pb,
    prompt_from_pb,
    prompt_to_pb,
    read_prompt,
)
from wire.convert_messages import command_from_pb, command_to_pb, event_from_pb, event_to_pb
from wire.description import InstanceDescription, ModelIdentity
from wire.errors import InvalidRequest
from wire.kv_layout import KvTensor
from wire.load import LinkStatus, LoadSnapshot
from wire.messages import (
    Adopt,
    Adopted,
    Cancel,
    Claimed,
    ClaimRun,
    ClaimState,
    Command,
    EndClaim,
    Event,
    Failed,
    Generate,
    HandedOff,
    Heartbeat,
    LinkMeasured,
    MeasureLink,
    OpenSession,
    Pooled,
    Prefill,
    PromptCommand,
    Refused,
    Reserve,
    Reserved,
    RoleHeld,
    RunEnd,
    SessionOpen,
    SetRole,
    Step,
    TableRead,
)
from wire.parameter_rules import MAX_LOGPROBS
from wire.prompt_images import MAX_IMAGE_BYTES, MAX_IMAGES
from wire.types import (
    PARAMETERS,
    Beam,
    BeamSearch,
    FinishReason,
    KvEndpoint,
    Pooling,
    PromptImage,
    PromptLogprobs,
    PromptState,
    RepetitionDetection,
    ResumableStream,
    Role,
    SamplingParams,
    StageTimes,
    StructuredOutput,
    Thinking,
    Ticket,
    TokenLogprobs,
    TokenOutput,
)

LINK = LinkStatus("d", "tcp", "up", 7, 5, 1, 2, 0.5, 1e9, ("shm: another host",))
_VALUES: list[Any] = [*range(1, len(fields(LoadSnapshot)) - 1), (3, 0, 1), (LINK,)]  # each field has its own
LOAD = LoadSnapshot(*_VALUES)
ENDPOINTS = (KvEndpoint("shm", "name", "boot"), KvEndpoint("tcp", "h:1", rank=1))
TICKET = Ticket("ab" * 16, 2**62, "decode-1", 7, 0, 10.0, ENDPOINTS)
PARAMS = SamplingParams(
    max_tokens=5, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, seed=2**63, n=2, min_tokens=1, stop_token_ids=(2, 7),
    best_of=3, repetition_penalty=1.1, presence_penalty=-2.0, frequency_penalty=0.5, logit_bias=((3, -100.0), (4, 1.5)),
    allowed_token_ids=(1, 2, 3), bad_words=((5,), (6, 7)), logprobs=0, prompt_logprobs=0,
    structured=StructuredOutput("json", "{}", "", "xgrammar"), logprob_token_ids=(9, 3),
    repetition_detection=RepetitionDetection(4, 1, 2), thinking=Thinking(8, 9, True, 3, 0),
    prompt_logprob_token_ids=((), (3, 5)),
)  # fmt: skip
SEARCH = SamplingParams(max_tokens=5, temperature=0.0, n=2, best_of=4, beam_search=BeamSearch(0.5, "never"))
PAIR = PromptState(
    "r/2", "r", (1, 2, 3), SamplingParams(max_tokens=1), pooling=Pooling("token_classify", "cls", True, 5, 2)
)
BEAMS = (Beam((4, 5), -1.5), Beam((6,), -0.5, True, 2, (TokenLogprobs(-0.5, 1, (6, 7), (-0.5, -1.0)),)))
PROMPT = PromptState("r/0", "r", (1, 2, 3), PARAMS, ((4,), (5, 6), (7,)), probe=True, cache_salt="tenant")
SEARCHED = PromptState("r/1", "r", (1, 2), SEARCH, beams=BEAMS)
IMAGES = (PromptImage(0, 4, b"a" * 32, (1, 2, 2), b"GIF"), PromptImage(5, 2, b"b" * 32, (1, 1, 2), b"123", "float16"))
SEEN = PromptState("r/3", "r", (9, 9, 9, 9, 1, 9, 9), SamplingParams(max_tokens=1), images=IMAGES)
RESUMABLE = PromptState(
    "r/4", "r", (1,), SamplingParams(max_tokens=1), stream=ResumableStream("5" * 32, "key-1", b"\0POST", 3)
)

COMMANDS: list[Command] = [
    OpenSession("s", 5, 10.0, 2.5),
    Reserve(PROMPT),
    Reserve(SEARCHED),
    Prefill(PROMPT, TICKET),
    Generate(PROMPT),
    Generate(SEEN),
    Generate(RESUMABLE),
    Cancel("r/0", 1, "client gone"),
    Cancel("r/0"),
    Cancel("r/0", owner_epoch=2),
    Adopt("5" * 32, "key-1"),
    Adopt("5" * 32, "", 0),
    ClaimRun("c", "1" * 32, "key-1", "2" * 32, "5" * 32),
    EndClaim("c", "1" * 32, "", "2" * 32, RunEnd.DONE, b"{\0}"),
    EndClaim("c", "1" * 32, "key-1", "2" * 32, RunEnd.LEFT),
    MeasureLink("d", 2**62, ENDPOINTS, 1 << 28),
    SetRole(Role.COMBINED, 2**62),
    Heartbeat(),
]
EVENTS: list[Event] = [
    SessionOpen("i", 7, LOAD),
    Reserved("r/0", TICKET, 0.001),
    Adopted("5" * 32, RESUMABLE, 7),
    Claimed("c", ClaimState.DONE, "5" * 32, b"{\0}"),
    Claimed("c", ClaimState.NEW),
    Refused("r/0", "NoCapacity", "full", LOAD),
    Refused("r/0", "NeverFits", "too big", param="prompt"),
    Step(
        (TokenOutput("r/0", 0, 0, 42), TokenOutput("r/0", 1, 3, None, FinishReason.CANCELLED)),
        LOAD,
        (("r/0", StageTimes(first_step_s=0.1)),),
    ),
    Step(
        (TokenOutput("r/0", 0, 0, 42, logprobs=TokenLogprobs(-0.25, 2, (7, 42), (-0.125, -0.25))),),
        LOAD,
        prompt_logprobs=(PromptLogprobs("r/0", 0, (None, TokenLogprobs(-1.5, 1))),),
    ),
    Step((TokenOutput("r/0", 0, 4, 0, FinishReason.STOP, 0),), LOAD),
    HandedOff("r/0", StageTimes(0.1, 0.2, 0.3, 0.4, None, 99, "shm", 66, 5, 2, 1)),
    Pooled("r/0", (0.5, -0.25), StageTimes(prefill_s=0.5)),
    Failed("r/0", "InternalError", "words"),
    LinkMeasured("d", LINK),
    LinkMeasured("d", None, "no KV link"),
    RoleHeld(Role.DECODE, 0),
    RoleHeld(Role.PREFILL, 2**62, 2**61, "words"),
    TableRead("7ab1e"),
    Heartbeat(LOAD),
    Heartbeat(),
]


def test_each_field_of_a_load_snapshot_survives_the_round_trip() -> None:
    assert load_from_pb(load_to_pb(LOAD)) == LOAD


def test_every_sampling_parameter_has_a_wire_field_and_bounds() -> None:
    own = {field.name for field in fields(SamplingParams)}
    objects = {"structured", "beam_search", "repetition_detection", "thinking"}
    bounded_by_the_prompt = {"prompt_logprob_token_ids"}

    assert own == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(PARAMETERS) == own - objects - bounded_by_the_prompt | {"length_penalty"}


def test_every_command_with_a_prompt_is_a_prompt_command() -> None:
    with_prompt = [kind for kind in get_args(Command) if "prompt" in {field.name for field in fields(kind)}]

    assert with_prompt == list(get_args(PromptCommand))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_every_command_survives_the_round_trip(command: Command) -> None:
    assert command_from_pb(command_to_pb(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_every_event_survives_the_round_trip(event: Event) -> None:
    assert event_from_pb(event_to_pb(event)) == event


def test_an_instance_description_survives_the_round_trip() -> None:
    description = InstanceDescription(
        "i", 3, "10.0.0.1", ("4", "5"), "0.0.0.0", 8088, 12, Role.PREFILL, "dig", 1, ModelIdentity("m", "w", "t"),
        4096, 49152, "float32", 16, 100, (KvTensor(0, "k", 3, 64, "float32"),), 512, 256, TICKET.endpoints, "cpu",
        False, ("shm: not named", "tcp"),
    )  # fmt: skip

    assert description_from_pb(description_to_pb(description)) == description


@pytest.mark.parametrize("state", [PROMPT, SEARCHED, PAIR, SEEN])
def test_a_prompt_description_survives_the_round_trip(state: PromptState) -> None:
    assert read_prompt(describe_prompt(state)) == state


def test_image_files_are_announced_to_the_computing_instance_alone() -> None:
    prefill, generate = command_to_pb(Prefill(SEEN, TICKET)).prefill, command_to_pb(Generate(SEEN)).generate
    prompts = [prefill.prompt, generate.prompt, command_to_pb(Reserve(SEEN)).reserve.prompt, prompt_to_pb(SEEN)]

    assert [[image.data_bytes for image in one.images] for one in prompts] == [[3, 3]] * 2 + [[0, 0]] * 2
    assert b"GIF" not in b"".join(one.SerializeToString() for one in prompts)
    assert read_prompt(describe_prompt(SEEN)).images[0].data == b""


def test_a_trace_for_other_engines_stays_here() -> None:
    traced = replace(PROMPT, traceparent=f"00-{'1' * 32}-{'2' * 16}-01")

    assert read_prompt(describe_prompt(traced)) == PROMPT


@given(st.binary(max_size=200))
def test_any_bytes_parse_as_a_prompt_or_an_invalid_request(data: bytes) -> None:
    try:
        state = read_prompt(data)
    except InvalidRequest:
        return
    assert state.token_ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("seed", -1),
        ("seed", 2**64),
        ("top_k", 2**31),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("min_p", 1.1),
        ("n", 0),
        ("min_tokens", 6),
        ("best_of", 1025),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 1e300),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name_and_value(field: str, value: float) -> None:
    values = {"max_tokens": 5, field: value}

    with pytest.raises(InvalidRequest, match=field) as caught:
        check_params(SamplingParams(**values))  # type: ignore[arg-type]

    assert caught.value.param == field
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 1), ("temperature", 1.0), ("top_p", 0.5), ("top_k", 1), ("min_p", 0.1),
        ("structured", StructuredOutput("regex", "a")), ("early_stopping", "perhaps"),
        ("repetition_detection", RepetitionDetection(2, 1, 2)), ("logprobs", 129),
    ],
)  # fmt: skip
def test_beam_search_refuses_incompatible_parameters(field: str, value: object) -> None:
    search = BeamSearch(early_stopping=str(value)) if field == "early_stopping" else BeamSearch()
    values = {"max_tokens": 5, "temperature": 0.0, "best_of": 2, "beam_search": search}
    if field != "early_stopping":
        values[field] = value

    with pytest.raises(InvalidRequest, match=field) as caught:
        check_params(SamplingParams(**values))  # type: ignore[arg-type]

    assert caught.value.param == field
    assert "RepetitionDetection(" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "entry", "maximum"),
    [
        ("stop_token_ids", 3, 1024), ("bad_words", (3,), 1024), ("logit_bias", (3, 1.0), 300_000),
        ("allowed_token_ids", 3, 300_000),
    ],
)  # fmt: skip
def test_a_list_that_is_too_long_is_refused_with_its_length(field: str, entry: Any, maximum: int) -> None:
    fitting: Any = {field: (entry,) * maximum}
    long: Any = {field: (entry,) * (maximum + 1)}

    check_params(SamplingParams(5, **fitting))
    with pytest.raises(InvalidRequest, match=rf"{field} has {maximum + 1} entries, .* is {maximum}") as caught:
        check_params(SamplingParams(5, **long))

    assert caught.value.param == field


@pytest.mark.parametrize("token_id", [2**31, -(2**31)])
@pytest.mark.parametrize("field", ["stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"])
def test_a_token_id_over_32_bits_is_refused_with_its_value(field: str, token_id: int) -> None:
    entries: Any = {"bad_words": ((5, token_id),), "logit_bias": ((5, 1.0), (token_id, 1.0))}

    with pytest.raises(InvalidRequest, match=rf"{field} has token id {token_id}, but each must be in \[-2147483647, "):
        check_params(SamplingParams(5, **{field: entries.get(field, (5, token_id))}))


@pytest.mark.parametrize("length", [0, 65])
def test_a_bad_word_of_no_or_too_many_tokens_is_refused(length: int) -> None:
    check_params(SamplingParams(5, bad_words=((1,), (2,) * 64)))
    with pytest.raises(InvalidRequest, match=rf"bad_words has a word of {length} tokens, but each must have 1 to 64"):
        check_params(SamplingParams(5, bad_words=((1,), (2,) * length)))


def test_log_probabilities_of_a_whole_vocabulary_fit_one_message() -> None:
    check_params(SamplingParams(5, logprobs=151_936, prompt_logprobs=MAX_LOGPROBS))
    ids = tuple(range(MAX_LOGPROBS))
    token = TokenLogprobs(-1.234567, MAX_LOGPROBS, ids, tuple(-one / 7 for one in ids))

    step = Step((), LOAD, prompt_logprobs=(PromptLogprobs("r/0", 0, (token,)),))

    assert event_to_pb(step).ByteSize() < MAX_MESSAGE_BYTES


def test_beams_of_a_prompt_without_beam_search_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="beams is set, but must be empty"):
        read_prompt(describe_prompt(PromptState("r/0", "r", (1,), SamplingParams(max_tokens=1), beams=BEAMS)))


@pytest.mark.parametrize(
    ("pooling", "param"),
    [
        (Pooling("draw"), "kind"), (Pooling(how="middle"), "how"), (Pooling(dimensions=0), "dimensions"),
        (Pooling(second_text=3), "second_text"), (Pooling(second_text=0), "second_text"),
    ],
)  # fmt: skip
def test_invalid_pooling_is_refused_by_name(pooling: Pooling, param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        read_prompt(describe_prompt(replace(PAIR, pooling=pooling)))

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("images", "error"),
    [
        ((PromptImage(-1, 2, b"a" * 32, (1, 1, 2)),), r"image 0 has the tokens \[-1, 1\), but .* within \[0, 7\)"),
        ((PromptImage(6, 2, b"a" * 32, (1, 1, 2)),), r"image 0 has the tokens \[6, 8\), but must .* within \[0, 7\)"),
        ((PromptImage(1, 0, b"a" * 32, (1, 1, 1)),), r"image 0 has the tokens \[1, 1\)"),
        ((IMAGES[0], replace(IMAGES[1], start=3)), r"image 1 has the tokens \[3, 5\), but must .* within \[4, 7\)"),
        (IMAGES[::-1], r"image 1 has the tokens \[0, 4\), but must .* within \[7, 7\)"),
        ((replace(IMAGES[0], digest=b"a" * 16),), "image 0 has a digest of 16 bytes instead of 32"),
        ((replace(IMAGES[0], grid=(1, 1, 3)),), r"image 0 has 4 tokens, but a grid of \(1, 1, 3\)"),
        ((replace(IMAGES[0], grid=(-1, -2, 2)),), r"image 0 has 4 tokens, but a grid of \(-1, -2, 2\)"),
        ((replace(IMAGES[0], dtype="int8"),), "image 0 has embeddings of type 'int8'; known types: float32, bfloat16"),
        ((replace(IMAGES[0], data=bytes(MAX_IMAGE_BYTES + 1)),), f"bytes, but the limit is {MAX_IMAGE_BYTES}"),
        (IMAGES[:1] * (MAX_IMAGES + 1), f"a prompt has {MAX_IMAGES + 1} images, but the limit is {MAX_IMAGES}"),
    ],
)  # fmt: skip
def test_impossible_images_are_refused_with_the_limit(images: tuple[PromptImage, ...], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error) as caught:
        check_prompt(replace(SEEN, images=images))

    assert caught.value.param == "images"


def test_an_image_grid_of_two_numbers_is_refused() -> None:
    message = prompt_to_pb(SEEN)
    del message.images[0].grid[0]

    with pytest.raises(InvalidRequest, match="the grid of an image has 2 numbers instead of 3"):
        prompt_from_pb(message)


def test_pooling_of_images_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="pooling of a prompt with images"):
        read_prompt(describe_prompt(replace(SEEN, pooling=Pooling())))


@pytest.mark.parametrize(
    ("stream", "changes", "error"),
    [
        ({"stream_id": "5" * 31}, {}, "32 hex digits"),
        ({"stream_id": "G" * 32}, {}, "32 hex digits"),
        ({"tenant": "t" * 129}, {}, "at most 128"),
        ({"request": b"r" * (2**20 + 1)}, {}, "at most 1048576"),
        ({}, {"params": SamplingParams(max_tokens=1, n=2)}, "must be unset with several sequences"),
        ({}, {"pooling": Pooling()}, "must be unset with several sequences, beam search, pooling"),
        ({}, {"token_ids": SEEN.token_ids, "images": IMAGES}, "must be unset with .* images"),
    ],
)
def test_a_stream_that_cannot_be_kept_is_refused(stream: Any, changes: Any, error: str) -> None:
    assert RESUMABLE.stream is not None
    with pytest.raises(InvalidRequest, match=error):
        check_prompt(replace(RESUMABLE, stream=replace(RESUMABLE.stream, **stream), **changes))


def test_an_unknown_early_stopping_value_is_refused() -> None:
    message = prompt_to_pb(SEARCHED)
    message.params.beam_search.early_stopping = "perhaps"

    with pytest.raises(InvalidRequest, match="early_stopping is 'perhaps'"):
        prompt_from_pb(message)


def test_a_cache_salt_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="129 characters, but the limit is 128"):
        read_prompt(describe_prompt(PromptState("r/0", "r", (1,), SamplingParams(max_tokens=1), cache_salt="s" * 129)))


def test_a_reserve_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="token"):
        command_from_pb(command_to_pb(Reserve(PromptState("r/0", "r", (), SamplingParams(max_tokens=1)))))


def test_outputs_for_some_sequences_only_are_refused() -> None:
    state = PromptState("r/0", "r", (1,), SamplingParams(max_tokens=1, n=3), ((4,),))

    with pytest.raises(InvalidRequest, match="the number of outputs is 1, but must be that of sequences, 3"):
        read_prompt(describe_prompt(state))


def test_an_unknown_role_or_finish_reason_is_refused() -> None:
    token = pb.TokenOutput(prompt_id="p", finish="melted")

    with pytest.raises(InvalidRequest, match="a FinishReason unknown to this version: 'melted'"):
        event_from_pb(pb.EventMessage(step=pb.Step(tokens=[token])))
    with pytest.raises(InvalidRequest, match="a Role unknown to this version: 'cook'"):
        description_from_pb(pb.InstanceDescription(role="cook"))
