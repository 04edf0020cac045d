"""The commands and scripts that the guides print, as printed but for host, port and the name of the module.

URL stands for http://localhost:8000 or http://${docker_ip}:8080, MODEL for ${container_model_path}.
"""

NOUS = "NousResearch/Meta-Llama-3-8B-Instruct"
OPT = "facebook/opt-125m"
SERVE = ("-m", "pdserve", "serve", NOUS, "--dtype", "auto", "--api-key", "token-abc123")
API_SERVER = (
    "-m", "pdserve.entrypoints.openai.api_server", "--model", OPT,
    "--chat-template", "./examples/template_chatml.jinja",
)  # fmt: skip

MODELS = "curl URL/v1/models"
COMPLETION = r"""curl URL/v1/completions \
    -H "Content-Type: application/json" \
    -d '{
        "model": "facebook/opt-125m",
        "prompt": "San Francisco is a",
        "max_tokens": 7,
        "temperature": 0
    }'
"""
CHAT = r"""curl URL/v1/chat/completions \
    -H "Content-Type: application/json" \
    -d '{
         "model": "facebook/opt-125m",
         "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Who won the world series in 2020?"}
        ]
    }'
"""
GUIDES_CHAT = r"""curl -X POST URL/v1/chat/completions \
-H "Content-Type: application/json" \
-d '{
 "model": "MODEL",
 "messages": [ { "role": "user", "content": "hello" } ],
 "max_tokens": 100,
 "top_k": -1,
 "top_p": 1,
 "temperature": 0,
 "ignore_eos": false,
 "stream": false
}'
"""
GUIDES_JSON = r"""curl -X POST URL/v1/completions \
-H "Content-Type: application/json" \
-d '{
 "model": "MODEL",
 "prompt": "Meet our valorous character, named Knight, who has reached the age of 32. Clad in impenetrable plate armor, Knight is well-prepared for any battle. Armed with a trusty sword and boasting a strength score of 90, this character stands as a formidable warrior on the field.Please provide details for this character, including their Name, Age, preferred Armor, Weapon, and Strength",
 "max_tokens": 200,
 "temperature": 0,
 "guided_json": "{\"title\": \"Character\", \"type\": \"object\", \"properties\": {\"name\": {\"title\": \"Name\", \"maxLength\": 10, \"type\": \"string\"}, \"age\": {\"title\": \"Age\", \"type\": \"integer\"}, \"armor\": {\"$ref\": \"#/definitions/Armor\"}, \"weapon\": {\"$ref\": \"#/definitions/Weapon\"}, \"strength\": {\"title\": \"Strength\", \"type\": \"integer\"}}, \"required\": [\"name\", \"age\", \"armor\", \"weapon\", \"strength\"], \"definitions\": {\"Armor\": {\"title\": \"Armor\", \"description\": \"An enumeration.\", \"enum\": [\"leather\", \"chainmail\", \"plate\"], \"type\": \"string\"}, \"Weapon\": {\"title\": \"Weapon\", \"description\": \"An enumeration.\", \"enum\": [\"sword\", \"axe\", \"mace\", \"spear\", \"bow\", \"crossbow\"], \"type\": \"string\"}}}"
}'
"""  # noqa: E501 - one line of JSON, as printed
COMPLETION_CLIENT = """
from openai import OpenAI

openai_api_key = "EMPTY"
openai_api_base = "URL/v1"
client = OpenAI(
    api_key=openai_api_key,
    base_url=openai_api_base,
)
completion = client.completions.create(model="facebook/opt-125m",
                                    prompt="San Francisco is a")
print("Completion result:", completion)
"""
CHAT_CLIENT = """
from openai import OpenAI
openai_api_key = "EMPTY"
openai_api_base = "URL/v1"

client = OpenAI(
    api_key=openai_api_key,
    base_url=openai_api_base,
)

chat_response = client.chat.completions.create(
    model="facebook/opt-125m",
    messages=[
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Tell me a joke."},
    ]
)
print("Chat response:", chat_response)
"""
KEYED_CLIENT = """
from openai import OpenAI
client = OpenAI(
base_url="URL/v1",
api_key="token-abc123",
)
completion = client.chat.completions.create(
model="NousResearch/Meta-Llama-3-8B-Instruct",
messages=[
{"role": "user", "content": "Hello!"}
]
)
print(completion.choices[0].message)
completion = client.chat.completions.create(
model="NousResearch/Meta-Llama-3-8B-Instruct",
messages=[
{"role": "user", "content": "Classify this sentiment: vLLM is wonderful!"}
],
extra_body={
"guided_choice": ["positive", "negative"]
}
)
"""
LLAVA = "llava-hf/llava-1.5-7b-hf"
PICTURE = "https://example.com/boardwalk.jpg"
PICTURE_CLIENT = """
from openai import OpenAI
openai_api_key = "EMPTY"
openai_api_base = "URL/v1"
client = OpenAI(
    api_key=openai_api_key,
    base_url=openai_api_base,
)
chat_response = client.chat.completions.create(
    model="llava-hf/llava-1.5-7b-hf",
    messages=[{
        "role": "user",
        "content": [
            {"type": "text", "text": "What's in this image?"},
            {
                "type": "image_url",
                "image_url": {
                    "url": "https://example.com/boardwalk.jpg",
                },
            },
        ],
    }],
)
print("Chat response:", chat_response)
"""
