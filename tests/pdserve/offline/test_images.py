"""Images in scripts: PIL images of prompts and chats become data URLs, and the tokens are those of transformers."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer

from pdserve import LLM, SamplingParams
from pdserve.offline.images import prompt_images, with_data_urls
from pdserve.offline.prompts import read_prompts
from tests.engine.tiny_vision_models import IMAGE_TOKEN
from tests.images.image_files import image_of
from tests.images.tiny_tokens import add_image_tokens
from tests.instance.image_prompts import ImageModel, make_image_model
from tests.pdserve.offline.conftest import ENGINE, ids

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PICTURES = [image_of(30, 20), image_of(20, 33, seed=1)]


def pixels_of(url: str) -> Image.Image:
    """Return the image of a data URL."""
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_an_image_is_sent_as_rgb_pixels(mode: str) -> None:
    image = image_of(5, 4, mode=mode)

    (url,) = prompt_images(0, {"image": image})

    assert pixels_of(url).tobytes() == image.convert("RGB").tobytes()


def test_an_orientation_in_the_images_file_is_not_applied_again() -> None:
    image, exif = image_of(6, 4), Image.Exif()
    exif[0x0112] = 6
    image.info["exif"] = exif.tobytes()

    (url,) = prompt_images(0, {"image": [image]})

    assert pixels_of(url).getexif() == {}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"image": 1}, TypeError, "prompt 3: multi_modal_data.image 0 is int, but must be a PIL image"),
        ({"image": [PICTURES[0], "a"]}, TypeError, "multi_modal_data.image 1 is str"),
        ({"video": 1}, ValueError, "prompt 3: multi_modal_data has video: only image is served"),
        ([], TypeError, "multi_modal_data is list"),
    ],
)
def test_other_data_is_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prompt_images(3, data)


def test_only_texts_that_generate_continues_have_images() -> None:
    data = {"image": PICTURES[0]}
    with pytest.raises(ValueError, match="only generate and chat take images"):
        read_prompts({"prompt": "a", "multi_modal_data": data})
    with pytest.raises(ValueError, match="pass its text as prompt"):
        read_prompts({"prompt_token_ids": [1], "multi_modal_data": data}, takes_images=True)


def test_parts_of_a_chat_that_are_images_become_urls() -> None:
    chat = [{"role": "user", "content": [{"type": "image_pil", "image_pil": PICTURES[0]}, {"type": "text"}]}]

    ((message),) = with_data_urls([*chat])

    assert pixels_of(message["content"][0]["image_url"]["url"]).size == (30, 20)
    assert message["content"][1] == {"type": "text"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    """A tiny LLaVA whose tokenizer has the placeholder."""
    folder = tmp_path_factory.mktemp("vision") / "llava"
    made = make_image_model("llava", folder)
    add_image_tokens(folder)
    return made


_PAIR = {"prefill": 1, "decode": 1, "trust_request_chat_template": True}


@pytest.fixture(scope="module", params=[pytest.param(one, marks=pytest.mark.long) for one in ({}, _PAIR)])
def llm(model: ImageModel, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An engine in this process, and a prefill and a decode instance."""
    keywords: dict[str, Any] = {**ENGINE, **request.param}
    with LLM(str(model.folder), **keywords) as llm:
        yield llm


def prompt_of(model: ImageModel, text: str, count: int) -> Any:
    """Return the prompt whose placeholders are the first pictures, as the scheduler makes it."""
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    token_ids = tokenizer.encode(text).ids
    files, plain = dict[int, bytes](), list[int]()
    for token_id in token_ids:
        if token_id == IMAGE_TOKEN:
            out = io.BytesIO()
            PICTURES[len(files)].save(out, "PNG")
            files[len(plain)] = out.getvalue()
        else:
            plain.append(token_id)
    assert len(files) == count
    return model.prompt("p", plain, files, max_tokens=8)


@pytest.mark.covers("B.images.11")
def test_generate_answers_as_transformers(llm: LLM, model: ImageModel) -> None:
    one, two = "<image>\nWhat is this?", "First <image> and then <image>, text."
    prompts: list[Any] = [
        {"prompt": one, "multi_modal_data": {"image": PICTURES[0]}},
        {"prompt": two, "multi_modal_data": {"image": PICTURES}},
        "Text alone",
    ]

    outputs = llm.generate(prompts, GREEDY)

    for output, text, count in zip(outputs, (one, two), (1, 2), strict=False):
        state = prompt_of(model, text, count)
        assert output.prompt_token_ids == list(state.token_ids)
        assert ids(output) == model.generate(state)
    assert len(ids(outputs[2])) == 8


def test_placeholders_and_images_must_be_as_many(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 0: the prompt has 0 placeholders \(<image>\) for 1 image"):
        llm.generate({"prompt": "none", "multi_modal_data": {"image": PICTURES[0]}}, GREEDY)


@pytest.mark.covers("B.images.11")
def test_chat_takes_pil_images_as_parts(llm: LLM, model: ImageModel) -> None:
    template = "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}"
    parts = [{"type": "text", "text": "See "}, {"type": "image_pil", "image_pil": PICTURES[0]}]

    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, chat_template=template)

    assert ids(output) == model.generate(prompt_of(model, "See <image>", 1))
